"""The plan of a job: what will run, what is shared, in which order, and what it should cost. Data only."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from blendserve.cost_model import CostModel
from blendserve.errors import PlanError
from blendserve.planner.output_length import (
    MIN_SAMPLES_PER_SUBTREE,
    OutputLengthEstimator,
    find_strata,
    sample_requests,
)
from blendserve.planner.prefix_tree import Ints, PrefixTree, PromptOrder
from blendserve.planner.tree_order import LeafCosts, LeafOrder, OrderConfig, order_leaves
from blendserve.request import RequestTable

Floats = NDArray[np.float64]

PLAN_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What the planner may decide."""

    order: OrderConfig = field(default_factory=OrderConfig)
    sample_ratio: float = 0.01
    """share of the requests that run first, to learn output lengths"""
    min_samples_per_subtree: int = MIN_SAMPLES_PER_SUBTREE
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """The job in figures. Seconds are modelled, at the expected output lengths."""

    num_requests: int
    num_prompt_tokens: int
    num_unique_prompt_tokens: int
    expected_output_tokens: float
    sharing_ratio: float
    density: float
    compute_s: float
    """after sharing"""
    memory_s: float
    sequential_s: float
    """lower bound of an engine that runs compute-bound and memory-bound operators one after the other"""
    optimum_s: float
    """lower bound with the device's overlap of the two; source: BlendServe §6.2, practical optimum"""
    num_split: int
    split_tokens: int
    num_units: int
    num_sampled: int


@dataclass(slots=True)
class Plan:
    """Order of a job's requests, with what it was derived from."""

    prompt_order: PromptOrder
    tree: PrefixTree
    prompt_tokens: Ints
    max_tokens: Ints
    declared_tokens: Ints
    stratum: Ints
    """[num_requests] requests of one number are of one kind as to their output lengths"""
    sampled: Ints
    """requests to run first, in this order"""
    output_tokens_est: Floats
    """[num_requests]"""
    leaf_order: LeafOrder
    config: PlanConfig
    cost_model: CostModel
    sampled_output_tokens: Ints | None = None
    """[num_sampled] output lengths of `sampled` where they are known before the run, as after a warm-up"""

    @property
    def num_requests(self) -> int:
        """Requests of the job."""
        return len(self.prompt_tokens)

    def estimator(self) -> OutputLengthEstimator:
        """A fresh estimator for a run of this plan."""
        estimator = OutputLengthEstimator(self.tree, self.max_tokens, self.declared_tokens)
        if self.sampled_output_tokens is not None:
            estimator.finished(self.sampled, self.sampled_output_tokens)
        return estimator

    def warmed_up(self, sampled_output_tokens: Ints) -> Plan:
        """This plan with the lengths of its sample known. Source: BlendServe §5.1."""
        known = replace(self, sampled_output_tokens=sampled_output_tokens)
        return known.reordered(known.estimator().estimate())

    def reordered(self, output_tokens_est: Floats, *, keep_split: bool = False) -> Plan:
        """This plan with other expected output lengths, sorted, merged and, without `keep_split`, split anew."""
        costs = LeafCosts.of(self.tree, output_tokens_est, self.cost_model)
        return replace(
            self,
            output_tokens_est=output_tokens_est,
            leaf_order=order_leaves(
                self.tree, costs, self.config.order, self.leaf_order if keep_split else None
            ),
        )

    def own_prompt_tokens(self) -> Ints:
        """[num_requests] prompt tokens of each request that it shares with no other."""
        own = np.empty(self.num_requests, dtype=np.int32)
        own[self.tree.requests] = self.tree.length - self.tree.leaf_start
        return own

    def prompt_share(self) -> Floats:
        """[num_requests] prompt tokens to compute for each request, shared ones divided among all that share them."""
        tree = self.tree
        parts = tree.segment / np.maximum(tree.end - tree.first, 1)
        share = np.empty(self.num_requests)
        share[tree.requests] = tree.length - tree.leaf_start + tree.path_sums(parts)[tree.leaf_parent]
        return share

    def compute_s(self) -> float:
        """Compute of the whole job with every shared prefix computed once, seconds."""
        prefill = self.cost_model.prefill_compute_s
        above = np.where(self.tree.parent >= 0, self.tree.depth[self.tree.parent], 0)
        shared = (prefill(self.tree.depth) - prefill(above)).sum()
        own = (prefill(self.tree.length) - prefill(self.tree.leaf_start)).sum()
        return float(shared + own + self.cost_model.decode_compute_s(self.output_tokens_est).sum())

    def memory_s(self) -> float:
        """KV reads of the whole job, seconds."""
        return float(self.cost_model.memory_s(self.prompt_tokens, self.output_tokens_est).sum())

    def density(self) -> float:
        """ρ(root): compute density of the whole job after sharing. Source: BlendServe §4.2."""
        return self.compute_s() / max(self.memory_s(), 1e-30)

    def summary(self) -> PlanSummary:
        """The job in figures."""
        compute_s, memory_s = self.compute_s(), self.memory_s()
        return PlanSummary(
            num_requests=self.num_requests,
            num_prompt_tokens=self.tree.num_units,
            num_unique_prompt_tokens=self.tree.num_unique_units,
            expected_output_tokens=float(self.output_tokens_est.sum()),
            sharing_ratio=self.tree.sharing_ratio,
            density=compute_s / max(memory_s, 1e-30),
            compute_s=compute_s,
            memory_s=memory_s,
            sequential_s=compute_s + memory_s,
            optimum_s=self.cost_model.hardware.overlap(compute_s, memory_s),
            num_split=self.leaf_order.num_split,
            split_tokens=self.leaf_order.split_tokens,
            num_units=len(self.leaf_order.unit_density),
            num_sampled=len(self.sampled),
        )

    def save(self, path: Path) -> None:
        """Write the plan as one `.npz` file, atomically."""
        meta = {
            "format": PLAN_FORMAT,
            "config": asdict(self.config),
            "signature": self._signature(self.prompt_order),
        }
        columns: dict[str, NDArray[Any]] = {
            "meta": np.frombuffer(orjson.dumps(meta), dtype=np.uint8),
            "sorted_requests": self.prompt_order.requests,
            "common": self.prompt_order.common,
            "sampled": self.sampled,
            "output_tokens_est": self.output_tokens_est,
        }
        buffer = io.BytesIO()
        np.savez(buffer, **columns)  # type: ignore[arg-type]
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(buffer.getvalue())
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path, requests: RequestTable, cost_model: CostModel) -> Plan:
        """Read a plan for the same requests.

        Raises:
            PlanError: the file is no plan, is of another version, or was made for other requests.
        """
        try:
            with np.load(path) as columns:
                meta = orjson.loads(columns["meta"].tobytes())
                order = PromptOrder(columns["sorted_requests"], columns["common"])
                sampled, output_tokens_est = columns["sampled"], columns["output_tokens_est"]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise PlanError(
                f"{path} is not a saved plan: {error}; make one with `blendserve plan --save`"
            ) from error
        if meta.get("format") != PLAN_FORMAT:
            raise PlanError(
                f"{path} has plan format {meta.get('format')}, expected {PLAN_FORMAT}; make the plan again"
            )
        if len(order.requests) != len(requests) or meta["signature"] != cls._signature(
            PromptOrder.of(requests.tokens, requests.prefix_groups)
        ):
            raise PlanError(
                f"{path} was made for other requests; make the plan again with `blendserve plan --save`"
            )
        config = meta["config"]
        config["order"] = OrderConfig(**config["order"])
        return _assemble(order, requests, cost_model, PlanConfig(**config), sampled, output_tokens_est)

    @staticmethod
    def _signature(order: PromptOrder) -> str:
        digest = hashlib.sha256(np.ascontiguousarray(order.requests).tobytes())
        digest.update(np.ascontiguousarray(order.common).tobytes())
        return digest.hexdigest()


def make_plan(requests: RequestTable, cost_model: CostModel, config: PlanConfig = PlanConfig()) -> Plan:
    """Plan a job: prefix tree, requests to sample, first estimates, order."""
    order = PromptOrder.of(requests.tokens, requests.prefix_groups)
    return _assemble(order, requests, cost_model, config, None, None)


def _assemble(
    order: PromptOrder,
    requests: RequestTable,
    cost_model: CostModel,
    config: PlanConfig,
    sampled: Ints | None,
    output_tokens_est: Floats | None,
) -> Plan:
    tree = PrefixTree.build(order, requests.prompt_tokens)
    stratum = find_strata(tree, requests.max_tokens)
    if sampled is None:
        sampled = sample_requests(
            tree,
            stratum,
            requests.declared_tokens,
            ratio=config.sample_ratio,
            min_per_subtree=config.min_samples_per_subtree,
            seed=config.seed,
        )
    if output_tokens_est is None:
        output_tokens_est = OutputLengthEstimator(
            tree, requests.max_tokens, requests.declared_tokens
        ).estimate()
    costs = LeafCosts.of(tree, output_tokens_est, cost_model)
    return Plan(
        prompt_order=order,
        tree=tree,
        prompt_tokens=requests.prompt_tokens,
        max_tokens=requests.max_tokens,
        declared_tokens=requests.declared_tokens,
        stratum=stratum,
        sampled=sampled,
        output_tokens_est=output_tokens_est,
        leaf_order=order_leaves(tree, costs, config.order),
        config=config,
        cost_model=cost_model,
    )
