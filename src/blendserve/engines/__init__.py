"""Engines: what runs the requests of a plan. All look alike to the job that drives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from blendserve.cost_model import CostModel
from blendserve.request import RequestTable, StepOutput
from blendserve.scheduling.policies import Policy


class Engine(Protocol):
    """Runs requests in the order a policy decides.

    `run` yields once per engine step and is driven by the caller: nothing happens between two `next` calls, so a
    caller that stops iterating stops the engine without losing what it already received.
    """

    name: str
    cost_model: CostModel
    kv_capacity_tokens: int
    max_model_len: int

    def run(self, requests: RequestTable, policy: Policy) -> Iterator[StepOutput]:
        """Run all `requests`; every request appears in exactly one `StepOutput.results`."""
        ...

    def close(self) -> None:
        """Free the engine's memory and processes; the engine cannot be used afterwards."""
        ...
