"""The disk tier of the prefix cache: blocks that leave memory are written behind the computation, and read back
when a prompt begins with their tokens.

The unit is a segment of SEGMENT_BLOCKS blocks, or the shorter end of a chain: one file (`snapshot.py`) in a folder
(`disk_folder.py`). A file's name is derived from its tokens and all tokens before them, but only the tokens that
it contains decide whether it is used. What is read becomes part of the prefix cache, so that nothing above the
block pool differs between computed and loaded blocks.

Three threads take part. The engine's copies blocks out of the caches and into them; one writes, one reads ahead.
"""

import hashlib
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from localllm.metrics import DiskStats, TierMove
from localllm.runtime.kv_cache.blocks import OutOfBlocks
from localllm.runtime.kv_cache.disk_folder import CacheFolder
from localllm.runtime.kv_cache.host_copies import HostCopy
from localllm.runtime.kv_cache.lower_tier import NOTHING_TO_LOAD, PrefixLoad
from localllm.runtime.kv_cache.prefix_copy import (
    SEGMENT_BLOCKS,
    copy_in,
    copy_out,
    with_frequencies,
)
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.runtime.kv_cache.snapshot import (
    CacheIdentity,
    DamagedSnapshot,
    KVSnapshot,
    SnapshotTokens,
    read_tokens,
    token_bytes,
)
from localllm.runtime.runner import Runner

MAX_BACKLOG_BYTES = 2**28  # copied out of the caches and not written yet; further blocks are not written
MAX_LOADS = 8  # sequences of the queue whose prefixes are read at once
MAX_READ_AHEAD_BYTES = 2**27  # read and not yet copied into the caches
MAX_HEADERS = 4096  # files whose tokens are remembered
CLOSE_S = 10.0  # for writing at shutdown
MAX_CLOSING_WRITES = 4  # segments that wait for the disk meanwhile
FILE_S = 0.002  # estimated time to open and check a file, before the first is measured
READ_BYTES_PER_S = 5e8  # estimated
MIN_MEASURED_TOKENS = 128  # of a prompt whose speed counts
RATE_WEIGHT = 0.3  # of the newest measurement in a rate


@dataclass(eq=False)
class Write:
    """A segment that was copied out of the caches."""

    tokens: SnapshotTokens
    copied: HostCopy


class Segment(NamedTuple):
    """A file to load blocks from."""

    name: str
    begin: int  # blocks of the sequence: the first that is loaded, and the first that is not
    end: int


@dataclass(eq=False)
class Load:
    """Segments that one sequence waits for, in order."""

    identity: CacheIdentity
    scope: str
    token_ids: ListLike[int]
    segments: list[Segment]
    state_length: int | None  # whose recurrent state is loaded, too
    serial: int  # of the last block that is in the cache
    installed: int = 0  # segments
    tokens: int = 0
    computed: int = 0  # by other processes
    done: bool = False
    began: float = field(default_factory=time.perf_counter)


class Loaded(NamedTuple):
    """A segment on the host; None instead of a snapshot if the file cannot be used."""

    load: Load
    segment: Segment
    snapshot: KVSnapshot | None
    nbytes: int


class DiskTier:
    """Connects a block pool and its runner with a folder. All methods are called on the engine's thread, except
    `close` after that has ended, and `stats`."""

    max_loads = MAX_LOADS

    def __init__(self, folder: CacheFolder, identity: CacheIdentity, *, writes_evicted: bool = True):
        """writes_evicted: write blocks that leave memory, also at shutdown; otherwise only those of `keep`."""
        self.folder = folder
        self.identity = identity
        self.writes_evicted = writes_evicted
        self.identities = {"": identity}
        self.headers = OrderedDict[str, SnapshotTokens]()  # of files, the least recently used first
        self.headers_lock = threading.Lock()
        self.backlog: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self.pending: dict[Write, None] = {}  # writes that have not ended
        self.saved: set[int] = set()  # cached blocks at which a segment ends that needs not be written again
        self.requests: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self.loaded: deque[Loaded] = deque()
        self.loads: list[Load] = []  # not done
        self.changed = threading.Condition()  # of `loaded`
        self.closed = False
        self.counts = DiskStats()
        self.token_s: float | None = None  # measured time to compute a prompt's token
        self.read_bytes_per_s = READ_BYTES_PER_S
        self.threads = [
            threading.Thread(target=self.write_behind, name="localllm-cache-writer", daemon=True),
            threading.Thread(target=self.read_ahead, name="localllm-cache-reader", daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def attach(self, runner: Runner, pool: BlockPool) -> None:
        """Serve a pool, and no longer the one before."""
        self.runner, self.pool = runner, pool
        self.saved.clear()
        for load in self.loads:
            load.done = True
        self.loads.clear()
        self.identities = {"": with_frequencies(self.identity, runner)}
        pool.lower = self

    @property
    def moves(self) -> dict[str, TierMove]:
        return self.counts.moves

    def identity_of(self, scope: str) -> CacheIdentity:
        if scope not in self.identities:
            self.identities[scope] = replace(self.identities[""], scope=scope)
        return self.identities[scope]

    # Writing

    def before_drop(self, serial: int) -> None:
        """Write the segments that contain a block, which is about to be overwritten."""
        if self.writes_evicted:
            for last in self.segment_ends(serial):
                self.save_segment(last)
        self.saved.discard(serial)

    def keep(self, serial: int) -> None:
        """Write the cached prefix that a block ends."""
        self.save_chain(serial)

    def save_all(self) -> None:
        """Write all cached blocks, those of the newest sequences first, as long as CLOSE_S permits."""
        if not self.writes_evicted:
            return
        deadline = time.monotonic() + CLOSE_S
        for serial in sorted(self.pool.prefixes, reverse=True):
            if serial not in self.pool.successors:
                if time.monotonic() > deadline:
                    break
                self.save_chain(serial, deadline)

    def save_chain(self, serial: int, deadline: float = 0.0) -> None:
        """Write the segments of the prefix that this block ends, as far as they are in memory. deadline: until
        which to wait for the disk, in seconds of `monotonic`"""
        lasts, size = list[int](), SEGMENT_BLOCKS * self.pool.block_size
        while prefix := self.pool.prefixes.get(serial):
            if not lasts or prefix.length % size == 0:
                lasts.append(serial)
            serial = prefix.key[0]
        for last in reversed(lasts):
            while len(self.pending) >= MAX_CLOSING_WRITES and time.monotonic() < deadline:
                time.sleep(0.005)
            self.save_segment(last)

    def segment_ends(self, serial: int) -> Iterator[int]:
        """Yield the cached blocks at which the segments end that contain a block."""
        size, stack = SEGMENT_BLOCKS * self.pool.block_size, [serial]
        while stack:
            current = stack.pop()
            is_last = self.pool.prefixes[current].length % size == 0 if current in self.pool.prefixes else True
            followers = () if is_last else self.pool.successors.get(current, ())
            if followers:
                stack.extend(followers)
            elif current in self.pool.prefixes:
                yield current

    def save_segment(self, last: int) -> None:
        """Copy the blocks of the segment that ends with this one out of the caches, unless they are on the disk or
        not all in memory."""
        pool, size = self.pool, self.pool.block_size
        if last in self.saved:
            return
        prefix = pool.prefixes[last]
        start = (prefix.length - 1) // (SEGMENT_BLOCKS * size) * SEGMENT_BLOCKS * size
        serials = [last]
        while pool.prefixes[serials[0]].length > start + size:
            parent = pool.prefixes[serials[0]].key[0]
            if parent not in pool.prefixes:
                return
            serials.insert(0, parent)
        if pool.recurrent:
            serials = self.until_state(serials)
        if not serials:
            return
        self.saved.add(last)
        prefix = pool.prefixes[serials[-1]]
        slots = {
            pool.prefixes[s].length: pool.state_slots.cached[s] for s in serials if s in pool.state_slots.cached
        }
        token_ids = token_bytes(prefix.token_ids[: prefix.length])
        tokens = SnapshotTokens(self.identity_of(prefix.scope), start, token_ids, frozenset(slots))
        if self.is_written(tokens):
            return
        if sum(write.copied.nbytes for write in list(self.pending)) > MAX_BACKLOG_BYTES:
            self.counts.skipped_segments += 1
            self.saved.discard(last)
            return
        blocks = [pool.cached[pool.prefixes[s].key] for s in serials]
        write = Write(tokens, copy_out(self.runner, pool, blocks, slots))
        self.pending[write] = None
        self.backlog.put(write)

    def is_written(self, tokens: SnapshotTokens) -> bool:
        """Return whether these tokens are on the disk, or will be."""
        self.folder.refresh()
        others = [other for _, other in self.candidates(tokens.identity, tokens.start, tokens.token_ids)]
        others += [write.tokens for write in list(self.pending)]
        return any(tokens.is_part_of(other) for other in others)

    def until_state(self, serials: list[int]) -> list[int]:
        """Return the blocks up to the last with a recurrent state, or all if they are a whole segment, which other
        segments may follow."""
        if len(serials) == SEGMENT_BLOCKS:
            return serials
        ends = [i + 1 for i, serial in enumerate(serials) if serial in self.pool.state_slots.cached]
        return serials[: max(ends, default=0)]

    def write_behind(self) -> None:
        """Write what `save_segment` copied: the body of a thread."""
        while write := self.backlog.get():
            began = time.perf_counter()
            try:
                tokens = write.tokens
                snapshot = write.copied.snapshot(tokens)
                names = FileNames(tokens.identity, self.segment_len, tokens.token_ids)
                candidates = list(self.candidates(tokens.identity, tokens.start, tokens.token_ids))
                replaced = [name for name, other in candidates if other.is_part_of(tokens)]
                if self.folder.write(names.last, snapshot.chunks(), snapshot.nbytes, replaced):
                    self.counts.written_files += 1
                    self.counts.written_bytes += snapshot.nbytes
                    self.counts.written_tokens += tokens.end - tokens.start
                    self.counts.write_s += time.perf_counter() - began
                self.folder.touch(names.all)
            except Exception as error:  # answers do not depend on it
                self.folder.report("write", f"the prefix cache cannot be written: {error}")
            self.pending.pop(write)

    # Reading

    def candidates(
        self, identity: CacheIdentity, start: int, token_ids: bytes
    ) -> Iterator[tuple[str, SnapshotTokens]]:
        """Yield the files whose segment begins at `start`, after the same tokens, and with the same block."""
        bucket = FileNames(identity, self.segment_len, token_ids[: (start + self.pool.block_size) * 4]).bucket
        for name in self.folder.names(bucket):
            tokens = self.tokens_of(name)
            if (
                tokens
                and tokens.identity.key == identity.key
                and tokens.start == start
                and tokens.token_ids[: start * 4] == token_ids[: start * 4]
            ):
                yield name, tokens

    def tokens_of(self, name: str) -> SnapshotTokens | None:
        """Return which tokens a file holds; None if it cannot be used."""
        with self.headers_lock:
            if tokens := self.headers.get(name):
                self.headers.move_to_end(name)
                return tokens
        try:
            tokens = read_tokens(self.folder.path / name)
        except FileNotFoundError:
            return None
        except (DamagedSnapshot, OSError) as error:
            self.folder.ignore(name, error)
            return None
        with self.headers_lock:
            self.headers[name] = tokens
            while len(self.headers) > MAX_HEADERS:
                self.headers.popitem(last=False)
        return tokens

    def begin_load(self, token_ids: ListLike[int], scope: str) -> PrefixLoad:
        """Begin to load what follows the cached prefix of these tokens, unless computing it is faster."""
        pool, size, identity = self.pool, self.pool.block_size, self.identity_of(scope)
        max_blocks = (len(token_ids) - 1) // size  # the last token is computed in any case
        serials, blocks = pool.cached_blocks(token_ids[: max_blocks * size], scope)
        packed = token_bytes(token_ids[: max_blocks * size])
        self.folder.refresh()
        segments, end, state_length, begin = list[Segment](), 0, None, 0
        while begin < max_blocks:
            best = self.longest_match(identity, begin, packed)
            if best is None:
                break
            name, tokens, matching = best
            end = begin + matching
            segments.append(Segment(name, begin, end))
            usable_states = [length for length in tokens.states if length <= end * size]
            state_length = max(usable_states, default=0) or state_length
            if matching < SEGMENT_BLOCKS:
                break
            begin = end
        if pool.recurrent:
            end = (state_length or 0) // size
        segments = [s._replace(end=min(s.end, end)) for s in segments if s.begin < end]
        reusable = pool.reusable_count(serials)
        if end <= reusable or not self.is_worthwhile(segments, end - reusable):
            return NOTHING_TO_LOAD
        missing = [s for s in segments if s.end > len(serials)] or segments[-1:]
        pool.mark_used(blocks)  # so that others are evicted for what follows them
        if end - len(serials) > pool.free_count - pool.unused_count(blocks):
            return NOTHING_TO_LOAD
        serial = serials[min(missing[0].begin, len(serials)) - 1] if missing[0].begin else pool.root_of(scope)
        load = Load(identity, scope, token_ids, missing, state_length if pool.recurrent else None, serial)
        self.loads.append(load)
        self.requests.put(load)
        return load

    def longest_match(
        self, identity: CacheIdentity, begin: int, packed: bytes
    ) -> tuple[str, SnapshotTokens, int] | None:
        """Return the file that holds most blocks of these tokens from block `begin` on, and how many."""
        width = 4 * self.pool.block_size
        best = None
        for name, tokens in self.candidates(identity, begin * self.pool.block_size, packed):
            count = 0
            for at in range(begin * width, min(len(packed), len(tokens.token_ids)), width):
                if packed[at : at + width] != tokens.token_ids[at : at + width]:
                    break
                count += 1
            if count and (best is None or (count, len(tokens.states)) > (best[2], len(best[1].states))):
                best = name, tokens, count
        return best

    def cancel_load(self, load: PrefixLoad) -> None:
        """Read no more of a prefix."""
        if isinstance(load, Load) and load in self.loads:
            load.done = True
            self.loads.remove(load)

    def is_worthwhile(self, segments: list[Segment], blocks: int) -> bool:
        """Return whether reading these segments is faster than computing so many blocks, as far as both speeds
        have been measured."""
        if self.token_s is None:
            return True
        nbytes = sum(file.size for s in segments if (file := self.folder.files.get(s.name)))
        read_s = nbytes / self.read_bytes_per_s + len(segments) * FILE_S
        is_faster = read_s < blocks * self.pool.block_size * self.token_s
        self.counts.slower_loads += not is_faster
        return is_faster

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Record how long computing the tokens of a prompt took."""
        if tokens >= MIN_MEASURED_TOKENS and seconds > 0:
            rate = seconds / tokens
            self.token_s = rate if self.token_s is None else self.token_s + RATE_WEIGHT * (rate - self.token_s)

    def read_ahead(self) -> None:
        """Read the segments of loads: the body of a thread."""
        while load := self.requests.get():
            for segment in load.segments:
                with self.changed:
                    self.changed.wait_for(lambda: self.waiting_bytes < MAX_READ_AHEAD_BYTES or self.closed)
                if load.done or self.closed:
                    break
                loaded = self.read(load, segment)
                with self.changed:
                    self.loaded.append(loaded)
                    self.changed.notify_all()
                if loaded.snapshot is None:
                    break
            self.folder.touch(FileNames(load.identity, self.segment_len, token_bytes(load.token_ids)).all)
            self.folder.touch([segment.name for segment in load.segments])

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were read and not copied yet."""
        return sum(loaded.nbytes for loaded in self.loaded)

    def read(self, load: Load, segment: Segment) -> Loaded:
        """Read a segment, and check that it holds the load's tokens."""
        began, file = time.perf_counter(), self.folder.path / segment.name
        try:
            with file.open("rb", buffering=0) as stream:
                content = bytearray(file.stat().st_size)
                view, count = memoryview(content), 0
                while count < len(content) and (part := stream.readinto(view[count:])):
                    count += part
            snapshot = KVSnapshot.parse(view[:count])
            size = self.pool.block_size
            wanted = token_bytes(load.token_ids[: segment.end * size])
            if (
                snapshot.tokens.identity.key != load.identity.key
                or snapshot.tokens.start != segment.begin * size
                or snapshot.tokens.token_ids[: len(wanted)] != wanted
            ):
                raise DamagedSnapshot("its tokens do not match its name")
        except FileNotFoundError:  # another process has removed it
            return Loaded(load, segment, None, 0)
        except (DamagedSnapshot, OSError, MemoryError) as error:
            self.folder.ignore(segment.name, error)
            return Loaded(load, segment, None, 0)
        seconds = time.perf_counter() - began
        self.counts.read_files += 1
        self.counts.read_bytes += count
        self.counts.read_s += seconds
        self.read_bytes_per_s += RATE_WEIGHT * (count / max(seconds, 1e-6) - self.read_bytes_per_s)
        return Loaded(load, segment, snapshot, count)

    def install_loaded(self, *, wait_s: float = 0.0) -> bool:
        """Copy the segments that have been read into the caches, and return whether that took time. wait_s: how
        long to wait for one if any sequence does"""
        if not self.loads:
            return False
        if wait_s:
            with self.changed:
                self.changed.wait_for(lambda: self.loaded, wait_s)
        while self.loaded:
            with self.changed:
                loaded = self.loaded.popleft()
                self.changed.notify_all()
            if not loaded.load.done:
                self.install(loaded)
        return True

    def install(self, loaded: Loaded) -> None:
        """Copy a segment into the caches and add it to the prefix index; without it, its load is done."""
        load = loaded.load
        try:
            is_installed = loaded.snapshot is not None and self.install_blocks(
                load, loaded.segment, loaded.snapshot
            )
        except (OutOfBlocks, DamagedSnapshot) as error:
            if isinstance(error, DamagedSnapshot):
                self.folder.ignore(loaded.segment.name, error)
            is_installed = False
        load.installed += is_installed
        if not is_installed or load.installed == len(load.segments):
            load.done = True
            self.loads.remove(load)

    def install_blocks(self, load: Load, segment: Segment, snapshot: KVSnapshot) -> bool:
        """Copy the blocks that are missing in memory, and the state that the load ends with. Returns whether the
        blocks before them are still there."""
        pool = self.pool
        if load.serial > 0 and load.serial not in pool.prefixes:
            return False
        states = snapshot.tokens.states & {load.state_length}
        load.serial, blocks = copy_in(
            self.runner,
            pool,
            snapshot,
            load.token_ids,
            segment.end,
            load.serial,
            load.scope,
            [length for length in states if length is not None],
        )
        load.tokens += blocks * pool.block_size
        self.counts.loaded_tokens += blocks * pool.block_size
        return True

    # Ending

    def close(self) -> None:
        """Write what is cached, as long as CLOSE_S permits, and end the threads."""
        began = time.monotonic()
        self.save_all()
        self.closed = True
        self.backlog.put(None)
        self.requests.put(None)
        with self.changed:
            self.changed.notify_all()
        for thread in self.threads:
            thread.join(max(0.0, began + CLOSE_S - time.monotonic()))

    @property
    def segment_len(self) -> int:
        """Tokens of a segment."""
        return SEGMENT_BLOCKS * self.pool.block_size


class FileNames:
    """The names of the files that hold a chain of tokens, which are not what decides whether they are used."""

    def __init__(self, identity: CacheIdentity, segment_len: int, token_ids: bytes):
        """segment_len: tokens of a segment; token_ids: int32, up to the end of a block"""
        self.all: list[str] = []
        width = 4 * segment_len
        before = hashlib.blake2b(identity.key, digest_size=16)
        for begin in range(0, len(token_ids), width):
            first_block, segment = before.copy(), before.copy()
            first_block.update(token_ids[begin : begin + width // SEGMENT_BLOCKS])
            segment.update(token_ids[begin : begin + width])
            self.bucket = first_block.hexdigest()
            self.all.append(f"{self.bucket}-{segment.hexdigest()}.safetensors")
            before = segment

    @property
    def last(self) -> str:
        return self.all[-1]
