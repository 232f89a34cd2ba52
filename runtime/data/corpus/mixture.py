"""Combines several sources of documents, each with a weight.

An epoch has each document of a source WEIGHT times. For the fractional part of a weight, documents
are drawn from the source. The draw depends only on the seed and on the number of documents, so a
resumed run draws the same ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from megatrain.runtime.data.documents import Documents, JoinedTokens
from megatrain.runtime.data.rows.sources import DataSource
from megatrain.simulator.base.errors import UserError


def joined(parts: Sequence[Documents], sources: Sequence[DataSource]) -> Documents:
    """Returns the documents of all parts, one part after the other. No token is copied.

    Args:
        parts: the documents of each source.
        sources: the sources, which errors name.

    Raises UserError if some parts are text and others are conversations or prompts with answers,
    which are packed into rows in different ways.
    """
    if len(parts) == 1:
        return parts[0]
    if len({part.whole for part in parts}) > 1:
        text, other = (
            next(
                str(source.path)
                for part, source in zip(parts, sources, strict=True)
                if part.whole == whole
            )
            for whole in (False, True)
        )
        raise UserError(
            "data",
            found=f"text in {text}, and prompts with answers in {other}",
            allowed="only text, or only conversations and prompts with answers",
            fix="train on one after the other",
        )
    tokens = JoinedTokens([part.tokens for part in parts])
    digests = msgspec.json.encode([part.digest for part in parts])
    return replace(
        parts[0],
        tokens=tokens,
        begins=np.concatenate(
            [part.begins + start for part, start in zip(parts, tokens.starts, strict=True)]
        ),
        ends=np.concatenate(
            [part.ends + start for part, start in zip(parts, tokens.starts, strict=True)]
        ),
        digest=hashlib.sha256(digests).hexdigest()[:16],
    )


def weighted(
    documents: Documents, starts: Sequence[int], weights: Sequence[float], seed: int
) -> Documents:
    """Returns the documents of an epoch: each document as often as the weight of its source says.

    For the fractional part of a weight, documents are drawn. If a source is a single text, its
    beginning is taken instead.

    Args:
        documents: the documents of all sources.
        starts: index of the first token of each source.
        weights: weight of each source.
        seed: seed of the draw.
    """
    if all(weight == 1 for weight in weights):
        return documents
    ends = documents.ends.copy()
    source_of = np.searchsorted(starts, documents.begins, side="right") - 1
    chosen, cut = [], []
    for number, weight in enumerate(weights):
        own = np.flatnonzero(source_of == number)
        fraction, times = math.modf(weight)
        chosen.append(np.tile(own, int(times)))
        if not fraction or not len(own):
            continue
        if len(own) == 1 and not documents.whole:
            cut.append(own)
            length = int(documents.lengths[own[0]])
            ends[own] = documents.begins[own] + max(2, round(length * fraction))
            continue
        drawn = np.random.default_rng([seed, number]).permutation(own)
        chosen.append(np.sort(drawn[: max(1, round(len(own) * fraction))]))
    digested = msgspec.json.encode([documents.digest, list(weights)])
    which = np.concatenate(chosen).astype(np.int64)
    shortened = replace(documents, ends=ends)
    parts = [documents.chosen(which), *(shortened.chosen(own) for own in cut)]
    return replace(
        documents,
        begins=np.concatenate([part.begins for part in parts]),
        ends=np.concatenate([part.ends for part in parts]),
        digest=hashlib.sha256(digested).hexdigest()[:16],
    )
