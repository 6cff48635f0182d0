"""A step whose blocks are compiled one by one, as those of ranks are: the rest of the model is eager code. No torch."""

from typing import Any

from foretrain.config.families import family_of
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.passage import Recorder
from foretrain.predict.abstract.ranks import State
from foretrain.predict.abstract.step import EagerProgram, Lettered
from foretrain.predict.compiled import operations
from foretrain.predict.compiled.graph import Compiler
from foretrain.predict.compiled.region import Function, Region
from foretrain.predict.compiled.step import LOADER, CompiledProgram


class BlocksProgram(CompiledProgram):
    """One graph for all blocks, which differ by their weights alone, and one for the loss."""

    def _shape_of(self, saving: bool) -> Any:
        return "blocks", super()._shape_of(saving)

    def _built(self) -> Any:
        if self.model is None:
            casts = self._dtypes()
            self.machine = self.ranks.machine(cuda=self.v.cuda, low=casts, attention=self._attention)
            self.model = self._of_recipe(Lettered(self.config, self.run[0], sum(self.run)))
            self.traced = LOADER.model(*family_of(self.config).model, Lettered(self.config, 0, 1))
            self._compile(casts)
            self.parameters = list(self.model.parameters())
            self.ranks.wrap(self.model, self.machine)
        return self.model

    def _compile(self, casts: m.DType | None) -> None:
        def make() -> Compiler:
            return Compiler(cuda=self.v.cuda, low=casts, attention=self._attention, functional=operations)

        seen: set[Any] = set()  # kernels that have run
        first = self.traced.layers()[0]
        block = Function(make, first.forward, list(first.parameters()), seen)
        for each in self.model.layers():
            each.forward = Region(block, list(each.parameters()))
        if self.model.chunked_loss is not None:
            self.model.chunked_loss.softmax_step_ = lambda logits, targets: m.make("sum", (), m.float32, logits)
        else:
            loss = Function(make, self.traced.whole_loss, [self.traced.lm_head.weight], seen)
            self.model.whole_loss = Region(loss, [self.model.lm_head.weight])

    def _recorded(self, saving: bool, state: State) -> Recorder:
        self._built()
        if self.traced.training != saving:
            self.traced.train(saving)
        return EagerProgram._recorded(self, saving, state)
