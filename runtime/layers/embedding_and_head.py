"""EmbeddingAndHead: runs the parts of a model before its first and after its last decoder layer.

transformers' models have their own code to scale embeddings, to build masks and positions, to
normalize, to project, and to cap and scale logits. This code runs unchanged: the model's own
forward is called with stubs instead of the decoder layers. The stub `Recording` records its
arguments, and the stub `Preset` returns given hidden states.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.layers.documents import masks
from megatrain.runtime.layers.linear_documents import ARGUMENT, STATEFUL
from megatrain.runtime.layers.scaled_positions import ScaledPositions
from megatrain.simulator.base.errors import UserError

Arguments = dict[str, Any]
"""Keyword arguments of a decoder layer: mask, positions and their embeddings, without the hidden
states."""


class Reached(Exception):
    """Ends a forward pass after the arguments of the last stub have been recorded."""


class Recording(nn.Module):
    """A stub that records the input and the arguments of the layer that it replaces.

    The stub of the last layer ends the forward pass by raising `Reached`. Other stubs return their
    input, in a tuple if `wrapped`.
    """

    def __init__(self, last: bool, layer: nn.Module, *, wrapped: bool = False) -> None:
        super().__init__()
        self.last, self.wrapped, self.rows, self.arguments = (
            last,
            wrapped,
            torch.empty(0),
            Arguments(),
        )
        self._names = list(inspect.signature(layer.forward).parameters)[1:]

    def forward(
        self, rows: torch.Tensor, *unnamed: Any, **arguments: Any
    ) -> torch.Tensor | tuple[torch.Tensor]:
        self.rows, self.arguments = (
            rows,
            {**dict(zip(self._names, unnamed, strict=False)), **arguments},
        )
        if self.last:
            raise Reached
        return (rows,) if self.wrapped else rows


class Preset(nn.Module):
    """A stub that returns `rows` and ignores its input. With `wrapped`, it returns a tuple, for
    models whose layers return tuples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.wrapped = torch.empty(0), False

    def forward(self, *_: Any, **__: Any) -> torch.Tensor | tuple[torch.Tensor]:
        return (self.rows,) if self.wrapped else self.rows


class _Zero(nn.Module):
    """Replaces a table of positions that has already been added to the rows. Returns 0."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(())


class NoEmbedding(nn.Module):
    """Replaces the embeddings of positions if no layer uses them. Returns None."""

    def forward(self, *_: Any, **__: Any) -> None:
        return None


def with_parts(module: Any, **parts: nn.Module) -> Any:
    """Returns a shallow copy of `module` in which `parts` replace the submodules with the same
    names. Buffers and parameters are shared with `module`.
    """
    other = copy.copy(module)
    other._modules = {**module._modules, **parts}
    return other


def _without_slopes(decoder: Any) -> Any:
    """Changes `decoder` to compute no ALiBi slopes (BLOOM), and returns it. The slopes would
    require a mask with two dimensions, and no layer uses them.
    """
    if hasattr(decoder, "build_alibi_tensor"):
        decoder.build_alibi_tensor = lambda *_, **__: None
    return decoder


def within(whole: Any, path: str, part: nn.Module) -> Any:
    """Returns a shallow copy of `whole` in which `part` replaces the module at `path`."""
    name, _, below = path.partition(".")
    return with_parts(whole, **{name: within(getattr(whole, name), below, part) if below else part})


def _masks_first_token(arguments: Arguments) -> bool:
    """Returns whether the mask keeps the second token from attending to the first."""
    mask = arguments.get("attention_mask")
    return mask is not None and bool(
        mask[0, 0, 1, 0] == (False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)
    )


class EmbeddingAndHead:
    """Runs the parts of a model before its first and after its last decoder layer."""

    def __init__(
        self,
        whole: Any,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        positions: tuple[str, ...] = (),
        norm: str = "norm",
        embedding_norm: str = "",
    ) -> None:
        """Builds the stubs, and runs the model on single tokens to find how it calls its layers.

        Args:
            whole: a model of `meta_model`.
            hidden: the hidden size.
            dtype: the dtype of the hidden states.
            device: the device of the model's buffers.
            positions: names of the tables of positions that the decoder adds to the embedding.
            norm: name of the final norm.
            embedding_norm: name of the norm between the embedding and the first layer, if there is
                one. The first layer applies it.

        Raises UserError if the runtime cannot train a model of this structure.
        """
        stack = DecoderStack.of(whole)
        base = stack.decoder_of(whole)
        layers = stack.layers_of(whole)
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._types: list[str] = getattr(base.config, "layer_types", None) or [
            "full_attention"
        ] * len(layers)
        self._preset = Preset()
        self._table = next(
            name for name, module in base._modules.items() if module is base.get_input_embeddings()
        )
        self.padding: int | None = base._modules[self._table].padding_idx
        """Token id whose row in the embedding table gets no gradient, or None."""
        table = with_parts(base._modules[self._table])
        table.padding_idx = None  # indices are not token ids
        bare: dict[str, nn.Module] = {"rotary_emb": NoEmbedding()}
        passed: dict[str, nn.Module] = {embedding_norm: nn.Identity()} if embedding_norm else {}
        self._positions = positions
        added: dict[str, nn.Module] = {name.partition(".")[0]: _Zero() for name in positions}
        self._entered = Recording(True, layers[0])
        self._entrance = _without_slopes(
            with_parts(
                base,
                **{stack.layers: nn.ModuleList([self._entered]), self._table: table},
                **bare,
                **passed,
            )
        )
        normed = Recording(True, base._modules[norm])
        self._preset.rows = torch.empty(2, 1, hidden, dtype=dtype, device=device)
        # A norm that is also the final norm is not removed. Its result here is not used.
        added |= {} if embedding_norm == norm else passed
        probed = _without_slopes(
            with_parts(
                base, **{stack.layers: nn.ModuleList([self._preset]), **bare, **added, norm: normed}
            )
        )
        self._exit = within(
            whole,
            stack.decoder,
            _without_slopes(
                with_parts(base, **{stack.layers: nn.ModuleList([self._preset])}, **bare, **added)
            ),
        )
        # transformers uses a mask with four dimensions unchanged, and builds no other mask.
        self._no_mask = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=device)
        self._no_positions = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._run(
            probed,
            inputs_embeds=self._preset.rows,
            position_ids=self._no_positions,
            attention_mask=self._no_mask,
        )
        # A model whose layers return tuples uses element 0 of a layer's output. Of the tensor
        # `rows`, element 0 is the first row, with two dimensions instead of three.
        self._preset.wrapped = normed.rows.dim() == 2
        self._recording = [
            Recording(index == len(layers) - 1, layer, wrapped=self._preset.wrapped)
            for index, layer in enumerate(layers)
        ]
        rotary = (
            {"rotary_emb": ScaledPositions.around(base.rotary_emb)}
            if hasattr(base, "rotary_emb")
            else {}
        )
        self._up_to_layers = with_parts(
            base, **{stack.layers: nn.ModuleList(self._recording)}, **rotary, **{**added, **passed}
        )
        self.plain = self._is_plain()
        """Whether the first layer's input is the unchanged rows of the embedding table."""

    def _is_plain(self) -> bool:
        row = torch.ones(1, 1, self._hidden, dtype=self._dtype, device=self._device)
        # More than one row, because OPT does not use its first two positions.
        none = {
            name: torch.zeros(8, self._hidden, dtype=self._dtype, device=self._device)
            for name in self._positions
        }
        first = self.enter([row], none)
        if not torch.equal(self.enter([2 * row], none), 2 * first):
            raise UserError(
                "model: model_type",
                found=(
                    f"{self._up_to_layers.config.model_type}, whose first layer's input is not"
                    " linear in the embedding's rows"
                ),
                allowed="a model that only scales its embedding or adds positions to it",
                fix="use a model of another family",
            )
        return not none and torch.equal(first, row)

    def arguments(
        self, batch: int, sequence: int, positions: torch.Tensor | None
    ) -> list[Arguments]:
        """Returns the keyword arguments of each decoder layer.

        Layers of the same attention type share their tensors. With documents, masks are [batch, 1,
        sequence, sequence].

        Args:
            batch: number of rows.
            sequence: tokens per row.
            positions: each token's distance from the start of its document, [batch, sequence]
                int64; None if each row is one document.
        """
        needs_masks = positions is not None and not self.packs
        rows = self._no_rows(batch, sequence)
        return self._recorded(
            rows,
            positions,
            (
                masks(self._up_to_layers.config, rows, positions)
                if needs_masks and positions is not None
                else None
            ),
        )

    def arguments_without_masks(self, positions: torch.Tensor) -> list[Arguments]:
        """Returns the keyword arguments of each decoder layer with a placeholder as mask, for
        documents that are separated without masks. Does not synchronize with the device.
        """
        return self._recorded(self._no_rows(*positions.shape), positions, self._no_mask)

    def _no_rows(self, batch: int, sequence: int) -> torch.Tensor:
        return torch.empty((), dtype=self._dtype, device=self._device).expand(
            batch, sequence, self._hidden
        )

    def _recorded(
        self, rows: torch.Tensor, positions: torch.Tensor | None, prepared: Any
    ) -> list[Arguments]:
        with torch.no_grad():
            self._run(
                self._up_to_layers,
                inputs_embeds=rows,
                position_ids=positions,
                attention_mask=prepared,
            )
        recorded = [stub.arguments for stub in self._recording]
        if positions is None:
            return recorded
        return [
            arguments | ({ARGUMENT: positions} if kind in STATEFUL else {})
            for arguments, kind in zip(recorded, self._types, strict=True)
        ]

    @functools.cached_property
    def packs(self) -> bool:
        """Whether the model's own masks separate documents. If not (gpt_oss, OPT and Llama 4, in
        transformers 5.23), `documents.masks` makes the masks.

        This is tested with two documents of one token. Raises ValueError if the masks of
        `documents.masks` do not separate documents either.
        """
        rows = torch.zeros(1, 2, self._hidden, dtype=self._dtype, device=self._device)
        positions = torch.zeros(1, 2, dtype=torch.int64, device=self._device)

        def keeps_apart(prepared: Any) -> bool:
            recorded = self._recorded(rows, positions, prepared)
            return all(
                kind == "linear_attention" or _masks_first_token(arguments)
                for arguments, kind in zip(recorded, self._types, strict=True)
            )

        # In a model's own masks, chunks start at the start of the row, not of the document.
        if "chunked_attention" not in self._types and keeps_apart(None):
            return True
        if not keeps_apart(masks(self._up_to_layers.config, rows, positions)):
            raise ValueError("attention across documents")
        return False

    def enter(
        self,
        rows: Sequence[torch.Tensor],
        tables: dict[str, torch.Tensor] | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the first layer's input, [batch, sequence, carried].

        It is linear in `rows` and in `tables`.

        Args:
            rows: for each table of the embedding, the table's row for each token, [batch, sequence,
                width].
            tables: tables of positions by name, [positions, hidden] each.
            positions: index of each token in `tables`, [batch, sequence] int64. None means the
                token's index in its row.
        """
        (row,) = rows
        batch, sequence, hidden = row.shape
        numbers = torch.arange(batch * sequence, device=row.device).view(batch, sequence)
        tensors = {f"{self._table}.weight": row.reshape(-1, hidden), **(tables or {})}
        if tables and positions is None:
            positions = torch.arange(sequence, device=row.device)[None].expand(batch, sequence)
        elif not tables:
            positions = self._no_positions
        self._run(
            self._entrance,
            tensors,
            input_ids=numbers,
            position_ids=positions,
            attention_mask=self._no_mask,
        )
        first: torch.Tensor = self._entered.rows
        self._entered.rows = torch.empty(0)
        return first

    def _run(
        self, model: Any, tensors: dict[str, torch.Tensor] | None = None, **inputs: Any
    ) -> None:
        try:
            functional_call(model, tensors or {}, (), {**inputs, "use_cache": False})
        except Reached:
            return
        raise UserError(
            "model: model_type",
            found=f"{model.config.model_type}, whose forward does not call its last decoder layer",
            allowed="a model that calls its decoder layers one after another",
            fix="use a model of another family",
        )

    def leave(self, tensors: dict[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """Returns the logits, [tokens, vocabulary], for the output of the last decoder layer.

        Args:
            tensors: parameters of the final norm and the projection, by full name.
            rows: output of the last decoder layer, [tokens, hidden].
        """
        self._preset.rows = rows[None]
        inputs = {
            "inputs_embeds": rows.detach()[None],
            "attention_mask": self._no_mask,
            "position_ids": self._no_positions,
            "use_cache": False,
        }
        output = functional_call(self._exit, tensors, (), inputs, tie_weights=False)
        self._preset.rows = self._no_mask
        logits: torch.Tensor = output.logits[0]
        return logits
