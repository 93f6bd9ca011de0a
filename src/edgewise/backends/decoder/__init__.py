"""Decoder language models on each runtime: any depth, any number of requests at once."""

from edgewise.backends.decoder.base import DecoderProgram, Precision, decoder_names, load_decoder

__all__ = ["DecoderProgram", "Precision", "decoder_names", "load_decoder"]
