"""Edges: what a model does before its first decoder layer and after its last one, by running its own forward without them.

transformers' models scale embeddings, build masks and positions, normalise, project, cap and scale logits in code of their own. All of it is
run as it stands: in place of the decoder layers are stand-ins, of which one notes what it is given and another one gives what it is told.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.layers.documents import masks
from megatrain.runtime.layers.linear_documents import ARGUMENT, STATEFUL
from megatrain.runtime.layers.scaled_positions import ScaledPositions
from megatrain.simulator.errors import UserError

Arguments = dict[str, Any]
"""what the model hands to a decoder layer besides the hidden states: mask, positions and their embeddings"""


class _Reached(Exception):
    """Every layer's arguments are known: the rest of the forward is not needed."""


class _Noting(nn.Module):
    """Notes the input and the arguments of the layer that it stands for; the last one ends the forward, the others return their input as `_Giving` does."""

    def __init__(self, last: bool, layer: nn.Module, *, wrapped: bool = False) -> None:
        super().__init__()
        self.last, self.wrapped, self.rows, self.arguments = last, wrapped, torch.empty(0), Arguments()
        self._names = list(inspect.signature(layer.forward).parameters)[1:]

    def forward(self, rows: torch.Tensor, *unnamed: Any, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor]:
        self.rows, self.arguments = rows, {**dict(zip(self._names, unnamed, strict=False)), **arguments}
        if self.last:
            raise _Reached
        return (rows,) if self.wrapped else rows


class _Giving(nn.Module):
    """Returns `rows` whatever its input is; `wrapped`: as the first of a tuple, for a model that takes the first of what its layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.wrapped = torch.empty(0), False

    def forward(self, *_: Any, **__: Any) -> torch.Tensor | tuple[torch.Tensor]:
        return (self.rows,) if self.wrapped else self.rows


class _Zero(nn.Module):
    """In place of a table of positions where the rows have them already."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(())


class _Nothing(nn.Module):
    """In place of positions' embeddings where no layer uses them."""

    def forward(self, *_: Any, **__: Any) -> None:
        return None


def _beside(module: Any, **parts: nn.Module) -> Any:
    """The same module, buffers and parameters shared, but with these parts in place of its own."""
    other = copy.copy(module)
    other._modules = {**module._modules, **parts}
    return other


def _without_slopes(decoder: Any) -> Any:
    """The same `decoder`, which makes no slopes of positions (BLOOM's); no layer uses them, and they need a mask of two dimensions."""
    if hasattr(decoder, "build_alibi_tensor"):
        decoder.build_alibi_tensor = lambda *_, **__: None
    return decoder


def _within(whole: Any, path: str, part: nn.Module) -> Any:
    """`whole` with `part` in place of its module at `path`."""
    name, _, below = path.partition(".")
    return _beside(whole, **{name: _within(getattr(whole, name), below, part) if below else part})


def _apart(arguments: Arguments) -> bool:
    """Whether of two tokens the second does not see the first."""
    mask = arguments.get("attention_mask")
    return mask is not None and bool(mask[0, 0, 1, 0] == (False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min))


class Edges:
    """The two edges of a `skeleton`, on the device of its buffers."""

    def __init__(
        self, whole: Any, hidden: int, dtype: torch.dtype, device: torch.device, positions: tuple[str, ...] = (), norm: str = "norm", entrance: str = ""
    ) -> None:
        """`positions`: the decoder's tables that its forward adds to the rows; `norm`: the name of its final norm; `entrance`: that of the norm that
        follows the embedding, which the first layer applies.
        """
        stack = DecoderStack.of(whole)
        base = stack.decoder_of(whole)
        layers = stack.layers_of(whole)
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._types: list[str] = getattr(base.config, "layer_types", None) or ["full_attention"] * len(layers)
        self._giving = _Giving()
        self._table = next(name for name, module in base._modules.items() if module is base.get_input_embeddings())
        self.padding: int | None = base._modules[self._table].padding_idx
        table = _beside(base._modules[self._table])
        table.padding_idx = None  # rows are looked up by number, not by token
        bare: dict[str, nn.Module] = {"rotary_emb": _Nothing()}
        passed: dict[str, nn.Module] = {entrance: nn.Identity()} if entrance else {}
        self._positions = positions
        added: dict[str, nn.Module] = {name.partition(".")[0]: _Zero() for name in positions}
        self._entered = _Noting(True, layers[0])
        self._entrance = _without_slopes(_beside(base, **{stack.layers: nn.ModuleList([self._entered]), self._table: table}, **bare, **passed))
        normed = _Noting(True, base._modules[norm])
        self._giving.rows = torch.empty(2, 1, hidden, dtype=dtype, device=device)
        added |= {} if entrance == norm else passed  # one norm for both: its first result is not used
        probed = _without_slopes(_beside(base, **{stack.layers: nn.ModuleList([self._giving]), **bare, **added, norm: normed}))
        self._exit = _within(whole, stack.decoder, _without_slopes(_beside(base, **{stack.layers: nn.ModuleList([self._giving])}, **bare, **added)))
        self._no_mask = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=device)  # of four dimensions: taken as it is, none is built
        self._no_positions = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._run(probed, inputs_embeds=self._giving.rows, position_ids=self._no_positions, attention_mask=self._no_mask)
        self._giving.wrapped = normed.rows.dim() == 2  # the first of the two rows, where a tensor was taken for a tuple
        self._noting = [_Noting(index == len(layers) - 1, layer, wrapped=self._giving.wrapped) for index, layer in enumerate(layers)]
        rotary = {"rotary_emb": ScaledPositions.around(base.rotary_emb)} if hasattr(base, "rotary_emb") else {}
        self._way_to_layers = _beside(base, **{stack.layers: nn.ModuleList(self._noting)}, **rotary, **{**added, **passed})
        self.plain = self._is_plain()
        """the first layer's input is the table's rows as they are"""

    def _is_plain(self) -> bool:
        row = torch.ones(1, 1, self._hidden, dtype=self._dtype, device=self._device)
        none = {name: torch.zeros(8, self._hidden, dtype=self._dtype, device=self._device) for name in self._positions}  # OPT's first two are not used
        first = self.enter(row, none)
        if not torch.equal(self.enter(2 * row, none), 2 * first):
            raise UserError(
                "model: model_type", found=f"{self._way_to_layers.config.model_type}, whose first layer's input is not linear in the embedding's rows",
                allowed="an embedding that is scaled or has positions added", fix="use a model of another family",
            )  # fmt: skip
        return not none and torch.equal(first, row)

    def arguments(self, batch: int, sequence: int, positions: torch.Tensor | None) -> list[Arguments]:
        """What each decoder layer is handed. `positions` [batch, sequence] int64: from each document's start; None: one document a row.

        Layers of one attention type are handed the same tensors. With documents the mask is [batch, 1, sequence, sequence].
        """
        helped = positions is not None and not self.packs
        rows = self._no_rows(batch, sequence)
        return self._noted(rows, positions, masks(self._way_to_layers.config, rows, positions) if helped and positions is not None else None)

    def arguments_without_masks(self, positions: torch.Tensor) -> list[Arguments]:
        """The same where something else keeps documents apart; nothing waits for the device."""
        return self._noted(self._no_rows(*positions.shape), positions, self._no_mask)

    def _no_rows(self, batch: int, sequence: int) -> torch.Tensor:
        return torch.empty((), dtype=self._dtype, device=self._device).expand(batch, sequence, self._hidden)

    def _noted(self, rows: torch.Tensor, positions: torch.Tensor | None, prepared: Any) -> list[Arguments]:
        with torch.no_grad():
            self._run(self._way_to_layers, inputs_embeds=rows, position_ids=positions, attention_mask=prepared)
        found = [noted.arguments for noted in self._noting]
        if positions is None:
            return found
        return [handed | ({ARGUMENT: positions} if kind in STATEFUL else {}) for handed, kind in zip(found, self._types, strict=True)]

    @functools.cached_property
    def packs(self) -> bool:
        """Whether the model keeps documents apart by itself, tried on two documents of one token; otherwise its masks are made for it (gpt_oss, OPT and
        Llama 4, in transformers 5.23). Raises ValueError where that does not help either.
        """
        rows = torch.zeros(1, 2, self._hidden, dtype=self._dtype, device=self._device)
        positions = torch.zeros(1, 2, dtype=torch.int64, device=self._device)

        def keeps_apart(prepared: Any) -> bool:
            noted = self._noted(rows, positions, prepared)
            return all(kind == "linear_attention" or _apart(handed) for handed, kind in zip(noted, self._types, strict=True))

        if "chunked_attention" not in self._types and keeps_apart(None):  # the model's own chunks count from a row's start
            return True
        if not keeps_apart(masks(self._way_to_layers.config, rows, positions)):
            raise ValueError("attention across documents")
        return False

    def enter(self, rows: torch.Tensor, tables: dict[str, torch.Tensor] | None = None, positions: torch.Tensor | None = None) -> torch.Tensor:
        """The first layer's input, of the tokens' rows of the embedding table: [batch, sequence, hidden] both. Linear in the rows and in `tables`
        [positions, hidden], those that are added at `positions` [batch, sequence] int64; None: each token's place in its row.
        """
        batch, sequence, hidden = rows.shape
        numbers = torch.arange(batch * sequence, device=rows.device).view(batch, sequence)
        tensors = {f"{self._table}.weight": rows.reshape(-1, hidden), **(tables or {})}
        if tables and positions is None:
            positions = torch.arange(sequence, device=rows.device)[None].expand(batch, sequence)
        elif not tables:
            positions = self._no_positions
        self._run(self._entrance, tensors, input_ids=numbers, position_ids=positions, attention_mask=self._no_mask)
        first: torch.Tensor = self._entered.rows
        self._entered.rows = torch.empty(0)
        return first

    def _run(self, model: Any, tensors: dict[str, torch.Tensor] | None = None, **inputs: Any) -> None:
        try:
            functional_call(model, tensors or {}, (), {**inputs, "use_cache": False})
        except _Reached:
            return
        raise UserError(
            "model: model_type", found=f"{model.config.model_type}, whose forward does not call its last decoder layer",
            allowed="a model that calls its decoder layers one after another", fix="use a model of another family",
        )  # fmt: skip

    def leave(self, tensors: dict[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, vocabulary] of the last layer's output `rows` [tokens, hidden]; `tensors`: final norm and projection by their full names."""
        self._giving.rows = rows[None]
        inputs = {"inputs_embeds": rows.detach()[None], "attention_mask": self._no_mask, "position_ids": self._no_positions, "use_cache": False}
        output = functional_call(self._exit, tensors, (), inputs, tie_weights=False)
        self._giving.rows = self._no_mask
        logits: torch.Tensor = output.logits[0]
        return logits
