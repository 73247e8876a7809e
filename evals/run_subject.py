"""What every stage of a run looks at: a loaded model, the plans of a suite, and the backend of the decode steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from driftgate.accuracy.adapters.families import Family, find_family
from driftgate.accuracy.crosscheck import steps_needed
from driftgate.accuracy.lockstep import LockstepRunner
from driftgate.accuracy.models import LoadedModel
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.records import BytesRecord
from driftgate.evals.answering import Decoder
from driftgate.evals.run_records import bytes_record, describe_device, read_versions
from driftgate.evals.suite import Suite
from driftgate.kernels.contract import Backend, HeadShape, Recurrence

__all__ = ["Subject"]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model under the plans of a suite.

    Attributes:
        suite: plans, sizes and seed.
        loaded: the model.
        backend: of the decode steps.
        dtype: as the model was loaded, None for the checkpoint's own.
        least_plans: blocks of rows for at least so many plans, in lock step and answers.
    """

    suite: Suite
    loaded: LoadedModel
    backend: Backend
    dtype: str | None
    least_plans: int = 0

    @property
    def plans(self) -> dict[str, PrecisionPlan]:
        """By key of results.json."""
        return self.suite.named_plans()

    @property
    def batch(self) -> int:
        """Streams that decode together."""
        return min(self.suite.batch, self.suite.sequences)

    @property
    def first_steps(self) -> int:
        """Decoded steps at the beginning whose inputs and logits are kept: the cycles that certify the kernels."""
        return min(self.suite.steps, steps_needed(self.plans, cycles=self.suite.cross_check_cycles))

    @property
    def layer_indices(self) -> list[int]:
        """Decoder-layer index of each recurrent layer."""
        return [int(mixer.layer_idx) for mixer in self._family.find_mixers(self.loaded.model)]

    @property
    def recurrence(self) -> Recurrence:
        """Of every recurrent layer."""
        return self._family.recurrence

    @property
    def shape(self) -> HeadShape:
        """Heads of every recurrent layer."""
        return self._family.head_shape(self._family.find_mixers(self.loaded.model)[0])

    @property
    def _family(self) -> Family:
        return find_family(self.loaded.model.config)

    def runner(self, plans: Mapping[str, PrecisionPlan], *, least_plans: int = 0) -> LockstepRunner:
        """Decodes streams under some plans beside the baseline; ``least_plans`` as above."""
        return LockstepRunner(
            self.loaded.model,
            plans,
            batch=self.batch,
            backend=self.backend,
            prefill=self.suite.prefill,
            vocab_size=self.loaded.vocab_size,
            seed=self.suite.seed,
            least_plans=least_plans,
        )

    def decoder(self) -> Decoder:
        """How the batches of item tasks are decoded."""
        device = self.loaded.model.device
        return Decoder(
            folder=self.loaded.folder,
            name=self.loaded.name,
            device=str(device),
            dtype=self.dtype,
            backend=self.backend,
            plans=self.plans,
            batch=self.suite.batch,
            seed=self.suite.seed,
            vocab_size=self.loaded.vocab_size,
            identity={
                "model": self.loaded.hashes,
                "versions": read_versions(),
                "device": describe_device(self.loaded.model),
            },
            least_plans=self.least_plans,
        )

    def find_bytes(self, plan: PrecisionPlan) -> BytesRecord:
        """Bytes and ideal traffic of a plan on the model."""
        return bytes_record(plan, self.recurrence, self.shape, self.layer_indices, self.loaded.model.dtype.itemsize)

    def describe(self) -> dict[str, Any]:
        """The model, for results.json."""
        shape = self.shape
        return {
            "name": self.loaded.name,
            "family": self.loaded.family,
            "parameters": self.loaded.n_parameters,
            "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
            "vocab_size": self.loaded.vocab_size,
            "key_heads": shape.key_heads,
            "value_heads": shape.value_heads,
            "d_k": shape.d_k,
            "d_v": shape.d_v,
        }
