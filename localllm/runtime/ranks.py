"""The processes that compute one model, as layers and runners see them; `localllm.parallel` implements them."""

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from typing import Protocol

from torch import Tensor

from localllm.arch.shard import Shard
from localllm.runtime.kv_cache.host_copies import CacheTypes, HostCopy
from localllm.runtime.kv_cache.sequence_state import CacheCopies, SequenceState


class OtherCaches(Protocol):
    """The caches of the other ranks, as rank 0 copies blocks out of them and into them, between two steps."""

    types: ListLike[CacheTypes]  # of each

    def copy_out(self, copies: CacheCopies, blocks: ListLike[int], state_slots: Mapping[int, int]) -> HostCopy:
        """Copy blocks to the host memory of this rank. copies: pending ones, executed before; state_slots: the
        recurrent states to copy, by their lengths"""
        ...

    def copy_in(
        self,
        copies: CacheCopies,
        blocks: ListLike[int],
        rows: Mapping[str, Tensor],
        states: Mapping[int, Mapping[str, Tensor]],
    ) -> None:
        """Fill blocks and state slots. copies: as in `copy_out`; rows, states: see `NamedCaches.unpack`, with the
        tensors of all ranks"""
        ...


class Ranks(Protocol):
    """This process and the others that compute the same model."""

    shard: Shard  # among the ranks that divide the same layers
    concurrent_steps: int  # that stages compute at a time; 1: each step waits for the one before it

    @property
    def other_caches(self) -> OtherCaches: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over all ranks of the stage, in place, and return it."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x [T, columns] of all ranks of the stage side by side."""
        ...

    def gather_columns(self, x: Tensor) -> Tensor:
        """Return x [N, columns] of all ranks of the stage side by side on its first, and x itself on others."""
        ...

    def send_step(
        self,
        states: ListLike[SequenceState],
        token_ids: ListLike[ListLike[int]],
        logit_index: ListLike[int],
        copies: CacheCopies,
        *,
        hidden: bool,
        has_unread: bool,
    ) -> None:
        """Send the work of a step to the other ranks, which then run it, too.

        hidden: the step ends with the hidden states of all tokens, without logits; has_unread: `broadcast` sends
        the token ids, some of which only the device of rank 0 knows
        """
        ...

    def broadcast(self, x: Tensor) -> None:
        """Copy x of rank 0 to all ranks that read it: those of the first stage."""
        ...

    def send_to_next_stage(self, x: Tensor) -> None:
        """Send x to the following stage, from the last to the first one."""
        ...

    def receive_from_previous_stage(self, x: Tensor) -> Tensor:
        """Fill x with what the previous stage sends, and return it; the first stage receives from the last."""
        ...

    def send_caches(self, blocks: int, state_slots: int, max_running: int, context: int) -> None:
        """Have the other ranks allocate caches of this size."""
        ...

    def step_failed(self, error: Exception) -> Exception:
        """Return the error to raise for a step that failed on this rank, after which the ranks are out of step."""
        ...
