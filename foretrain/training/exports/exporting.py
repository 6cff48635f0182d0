"""A trained model in the files that other programs read.

Weights come from a checkpoint's files, after their digests. Files are staged beside their place and renamed.
"""

from pathlib import Path

from foretrain.training.exports.folder import check_free, write_all
from foretrain.training.exports.forms import Exported, Form, FormOptions, module_of, quantize_command
from foretrain.training.exports.source import Source
from foretrain.training.folder.located import locate


def export(
    path: Path,
    form: Form,
    out: Path | None = None,
    *,
    best: bool = False,
    force: bool = False,
    options: FormOptions | None = None,
) -> Exported:
    """Write the model of a run (its newest intact checkpoint, or its best) or of a checkpoint's folder.

    `out` is made, and must be empty unless `force`, which replaces files of the same names only. Raises UserError.
    """
    found = locate(path, best=best)
    module = module_of(form)
    if error := module.refusal(found.run.read_record().config):
        raise error
    out = out or found.run.path / f"export-{form}"
    check_free(out, force=force)
    source, asked = Source(found.path, found.run), options or FormOptions()
    names = write_all(out, lambda folder: module.write(source, folder, asked))
    return Exported(
        form=form, path=str(out), checkpoint=found.path.name, step=source.progress.step, files=names,
        skipped=() if best else found.skipped, notes=tuple(source.notes),
        quantize=quantize_command(out, asked) if form == "gguf" else "",
    )  # fmt: skip
