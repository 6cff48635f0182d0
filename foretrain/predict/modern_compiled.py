"""The ledger of a compiled step of the modern recipe."""

from foretrain.predict.inductor import CompiledStep


class ModernCompiledStep(CompiledStep):
    """Writes compiled forward, backward and evaluation graphs into a timeline."""
