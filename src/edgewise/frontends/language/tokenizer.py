"""Text to token ids and back, from the files of a Hugging Face folder or a GGUF file's metadata."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgewise.errors import BackendUnavailable, DataError, ModelError

_LOG = logging.getLogger(__name__)

TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG, TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
CONFIG = "config.json"
ReadText = Callable[[str], str | None]
"""Text of one of these files by its name; ``None`` where there is none."""

_CONTROL, _USER_DEFINED = 3, 4  # kinds of token in a GGUF file
# How text is split before merging, by the name llama.cpp gives it: as the tokenizer.json of GPT-2,
# Llama 3 and Qwen2 say.
_GPT2_LIKE = ("default", "gpt-2", "olmo")
_SPLITS = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "dbrx"),
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen"),
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


class TextTokenizer:
    """A tokenizer of the ``tokenizers`` package with a chat template; shared by all threads.

    Args:
        tokenizer: The package's own.
        stop_ids: Tokens that end an answer.
        template: Jinja template of a conversation; ``None`` where the model has none.
        special: Names and texts that the template may use, such as ``bos_token``.
        where: The model, for messages.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_ids: frozenset[int],
        template: str | None,
        special: Mapping[str, str],
        where: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._special = dict(special)
        self._where = where
        self._template = template

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._stop_ids

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the first token that transformers would put before it.

        Raises:
            DataError: The text holds half a character.
        """
        return self._ids(text, special=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out."""
        text: str = self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=True)
        return text

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation by the model's template, ready for the answer.

        Args:
            messages: Each with ``role`` and ``content``.

        Raises:
            ModelError: The model has no chat template, or a damaged one.
            BackendUnavailable: jinja2 is not installed.
            DataError: The template refuses the messages.
        """
        if self._template is None:
            raise ModelError(
                f"{self._where} has no chat template", help="give the prompt as plain text"
            )
        template = _compiled(self._template, self._where)
        from jinja2 import TemplateError

        try:
            text = template.render(
                messages=[dict(m) for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except (TemplateError, TypeError, AttributeError) as error:
            raise DataError(
                f"the chat template of {self._where} refuses these messages: {error}",
                help="each message has a role (user, assistant, perhaps system) and a content",
            ) from error
        return self._ids(text, special=False)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise DataError(f"expected a text of whole characters: {error}") from error
        return ids


def read_tokenizer(read: ReadText, *, where: str, vocab_size: int) -> TextTokenizer | None:
    """Build a tokenizer from a model's files.

    Args:
        read: Reads one of the files.
        where: The model, for messages.
        vocab_size: Tokens the model knows.

    Returns:
        ``None``, with a warning in the log, where there is no ``tokenizer.json``.

    Raises:
        ModelError: A file is damaged, or the tokenizer knows more tokens than the model.
        BackendUnavailable: tokenizers is not installed.
    """
    content = read(TOKENIZER)
    if content is None:
        _LOG.warning("%s has no %s: its texts must be given as token ids", where, TOKENIZER)
        return None
    tokenizers = _import_tokenizers()
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the package raises nothing more special
        raise ModelError(f"{where}: {TOKENIZER} is damaged: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if size > vocab_size:
        raise ModelError(f"{where}: the tokenizer has {size} tokens, the model {vocab_size}")
    config = _json(read, TOKENIZER_CONFIG, where)
    template = read(TEMPLATE)
    if template is None:
        template = _template_of(config.get("chat_template"))
    special = {
        k: _text_of(v)
        for k, v in config.items()
        if k.endswith("_token") and isinstance(v, str | dict)
    }
    stops = _json(read, GENERATION_CONFIG, where) or _json(read, CONFIG, where)
    return TextTokenizer(
        tokenizer,
        stop_ids=_stop_ids(tokenizer, special, stops, vocab_size),
        template=template,
        special=special,
        where=where,
    )


def gguf_tokenizer_files(metadata: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Write a GGUF file's tokenizer as the files of a Hugging Face folder.

    Args:
        metadata: Keys and values of the file.
        path: The file.

    Returns:
        Texts by file name; without ``tokenizer.json`` where the file holds no tokenizer.

    Raises:
        ModelError: A kind of tokenizer that is not supported, or a damaged one.
        BackendUnavailable: A package is not installed.
    """

    def get(key: str) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}")

    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    stops = sorted({get(n) for n in names if isinstance(get(n), int)})
    files = {GENERATION_CONFIG: json.dumps({"eos_token_id": stops}) + "\n"}
    kind, tokens = get("model"), get("tokens")
    if kind is None or not isinstance(tokens, list):
        return files
    if kind == "gpt2":
        files[TOKENIZER] = _byte_level(metadata, path)
    elif kind == "llama":
        files[TOKENIZER] = _sentencepiece(path)
    else:
        raise ModelError(
            f"{path}: a tokenizer of the kind {kind!r} is not supported",
            help="supported are gpt2 (byte-level BPE) and llama (SentencePiece)",
        )
    special = {
        f"{ours}_token": tokens[get(f"{theirs}_token_id")]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if isinstance(get(f"{theirs}_token_id"), int) and get(f"{theirs}_token_id") < len(tokens)
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    files[TOKENIZER_CONFIG] = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
    if isinstance(metadata.get("tokenizer.chat_template"), str):
        files[TEMPLATE] = metadata["tokenizer.chat_template"]
    return files


def _byte_level(metadata: Mapping[str, Any], path: Path) -> str:
    tokenizers = _import_tokenizers()
    from tokenizers import decoders, models, processors

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in metadata.get("tokenizer.ggml.merges", ())]
    kind = metadata.get("tokenizer.ggml.pre", "default")
    try:
        tokenizer = tokenizers.Tokenizer(
            models.BPE(
                vocab={token: n for n, token in enumerate(tokens)},
                merges=merges,
                # As the tokenizer.json of Llama 3 has it.
                ignore_merges=kind in {"llama3", "llama-v3", "llama-bpe"},
            )
        )
    except Exception as error:  # the package raises nothing more special
        raise ModelError(f"{path}: its tokenizer is damaged: {error}") from error
    tokenizer.pre_tokenizer = _split(kind, path)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    add = tokenizers.AddedToken
    tokenizer.add_special_tokens(
        [add(t, normalized=False) for t, k in zip(tokens, kinds, strict=False) if k == _CONTROL]
    )
    tokenizer.add_tokens(
        [
            add(t, normalized=False)
            for t, k in zip(tokens, kinds, strict=False)
            if k == _USER_DEFINED
        ]
    )
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") and isinstance(bos, int) and bos < len(tokens):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    text: str = tokenizer.to_str()
    return text


def _split(kind: str, path: Path) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if kind in _GPT2_LIKE:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    if kind in _SPLITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[kind]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise ModelError(
        f"{path}: how its tokenizer splits text, {kind!r}, is not supported",
        help=f"supported are smollm, {', '.join((*_GPT2_LIKE, *_SPLITS))}",
    )


def _sentencepiece(path: Path) -> str:
    """Let transformers rebuild the merges, which the file does not hold."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise BackendUnavailable(
            f"a SentencePiece tokenizer in a GGUF file needs transformers: {error}",
            help="pip install 'edgewise[lm]'",
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True
        )
        text: str = tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # whatever a damaged vocabulary causes there
        raise ModelError(f"{path}: its tokenizer cannot be read: {error}") from error
    return text


def _stop_ids(
    tokenizer: Any, special: Mapping[str, str], generation: Mapping[str, Any], vocab_size: int
) -> frozenset[int]:
    said = generation.get("eos_token_id")
    ids = {*(said if isinstance(said, list) else [said])}
    if "eos_token" in special:
        ids.add(tokenizer.token_to_id(special["eos_token"]))
    return frozenset(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size)


def _template_of(said: Any) -> str | None:
    """A configuration's template: one text, or several by name."""
    if isinstance(said, list):
        named = {t["name"]: t["template"] for t in said if isinstance(t, dict) and "name" in t}
        said = named.get("default")
    return said if isinstance(said, str) else None


def _text_of(token: Any) -> str:
    return str(token.get("content", "") if isinstance(token, dict) else token)


def _json(read: ReadText, name: str, where: str) -> dict[str, Any]:
    text = read(name)
    if text is None:
        return {}
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{where}: {name} is damaged: {error}") from error
    return document if isinstance(document, dict) else {}


@functools.lru_cache(maxsize=8)
def _compiled(template: str, where: str) -> Any:
    """Compile a template as transformers does.

    Source:
        transformers' documentation, "Writing a chat template".
    """
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise BackendUnavailable(
            f"the chat template of {where} needs jinja2: {error}",
            help="pip install 'edgewise[lm]'",
        ) from error

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def now(form: str) -> str:
        from datetime import datetime

        return datetime.now().astimezone().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": now}
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ModelError(f"{where}: its chat template is damaged: {error}") from error


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise BackendUnavailable(
            f"a language model needs the package tokenizers: {error}",
            help="pip install 'edgewise[lm]'",
        ) from error
    return tokenizers
