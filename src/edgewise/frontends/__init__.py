"""One file per source of models; each makes a `Source` for `edgewise.model.StagedModel`."""
