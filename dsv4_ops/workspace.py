"""Scratch memory, one buffer for each ``(ubatch, lane)``, that captured CUDA graphs can rely on.

A captured graph holds raw pointers. If target and draft shared one scratch buffer, growth or writes of one side would corrupt the other's
replay, so each works in a lane of its own: 0 target, 1 draft, more if asked. Which lane an op works in is ``lane_context.py``.

=============================  ======================================================================================
``workspace_manager(device)``  the manager that ops of this package use
``manager.get(spec, spec)``    views that never overlap, valid until the next ``get`` of the same slot
``manager.reserve / lock``     size everything before the first capture, then refuse growth
``manager.capture(graph)``     scope of one capture: storage seen by the graph lives as long as the graph object
=============================  ======================================================================================

Rules that the contract leaves open: lanes are sized independently of each other, and ``lock()`` brings every ubatch of a lane to that
lane's largest size, so that an ubatch that warm-up did not use still works. An op asks once for everything that it needs and calls no
other op of the same lane while it uses the views. Contents are garbage at entry. Two threads that share a slot share its bytes.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import envs
from .errors import LaneError, WorkspaceError, WorkspaceLockedError
from .lane_context import AMBIENT, MAX_LANES, current_lane, current_ubatch, resolve_lane, use_workspace_lane, use_workspace_ubatch

__all__ = [
    "AMBIENT",
    "MAX_LANES",
    "CapturedGraphs",
    "GraphLease",
    "SlotReport",
    "WorkspaceManager",
    "current_lane",
    "current_ubatch",
    "num_workspace_lanes",
    "resolve_lane",
    "set_workspace_manager",
    "use_workspace_lane",
    "use_workspace_ubatch",
    "workspace_manager",
]

logger = logging.getLogger(__name__)

ALIGNMENT = 256


def num_workspace_lanes(config: Any) -> int:
    """2 when ``config`` has a drafter with captured graphs of its own beside the target's, else 1.

    ``config`` is an ``EngineConfig`` or an engine's config with the usual names: a drafter is a ``mode`` other than "plain" or a
    ``speculative_config``; graphs are captured when ``capture_sizes`` (``cudagraph_capture_sizes``, also of a ``compilation_config``)
    is not empty and ``enforce_eager`` is not set. ``draft_capture_sizes``, where present, decides for the drafter alone.
    Raises LaneError for a config with neither ``mode`` nor ``speculative_config``.
    """
    if not hasattr(config, "mode") and not hasattr(config, "speculative_config"):
        raise LaneError(f"num_workspace_lanes: {type(config).__name__} has neither mode nor speculative_config. Pass the engine's config.")
    drafter = getattr(config, "mode", None) not in (None, "plain") or getattr(config, "speculative_config", None) is not None
    if getattr(config, "enforce_eager", False):
        return 1
    holders = [holder for holder in (config, getattr(config, "compilation_config", None)) if holder is not None]
    names = ("capture_sizes", "cudagraph_capture_sizes")
    captured = any(len(getattr(holder, name, None) or ()) for holder in holders for name in names)
    draft = getattr(config, "draft_capture_sizes", None)
    return 2 if drafter and captured and (draft is None or len(draft) > 0) else 1


@dataclass(eq=False)
class _Buffer:
    """One allocation of one slot."""

    storage: torch.Tensor
    address: int
    nbytes: int
    lane: int
    ubatch: int
    generation: int
    leases: set[int] = field(default_factory=set)
    pinned: bool = False
    """Handed out inside a capture that no scope told us about: no one can say when that graph dies."""
    streams: dict[int, Any] = field(default_factory=dict)
    _typed: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def carve(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        typed = self._typed.get(dtype)
        if typed is None:
            start = self.address - self.storage.data_ptr()
            with torch.inference_mode(False):  # what is made in inference mode could not be written outside it
                typed = self._typed[dtype] = self.storage[start : start + self.nbytes].view(dtype)
        strides, step = [], 1
        for extent in reversed(shape):
            strides.append(step)
            step *= max(extent, 1)
        return typed.as_strided(tuple(shape), strides[::-1], typed.storage_offset() + offset // dtype.itemsize)

    def release(self) -> None:
        for stream in self.streams.values():
            self.storage.record_stream(stream)


class GraphLease:
    """Scratch that one captured graph has seen. It lives until the graph object dies or :meth:`release` is called."""

    def __init__(self, manager: WorkspaceManager) -> None:
        self._manager = weakref.ref(manager)
        self._buffers: dict[int, _Buffer] = {}
        self._used: dict[tuple[int, int], int] = {}

    def _add(self, buffer: _Buffer) -> None:
        self._buffers[id(buffer)] = buffer
        buffer.leases.add(id(self))

    def _uses(self, buffer: _Buffer) -> None:
        self._add(buffer)
        self._used[(buffer.ubatch, buffer.lane)] = buffer.generation

    @property
    def is_current(self) -> bool:
        """Whether every buffer that the graph uses is still the one that new requests get."""
        manager = self._manager()
        return manager is not None and all(manager.generation(lane, ubatch) == generation for (ubatch, lane), generation in self._used.items())

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def replays_on(self, stream: Any) -> None:
        """The graph is replayed on ``stream``: storage that is released while a replay is queued there waits for it."""
        for buffer in self._buffers.values():
            buffer.streams[stream.cuda_stream] = stream

    def release(self) -> None:
        """The graph will never replay again. Called by itself when the graph object is collected."""
        manager = self._manager()
        buffers, self._buffers = list(self._buffers.values()), {}
        for buffer in buffers:
            buffer.leases.discard(id(self))
        if manager is not None:
            manager._drop_unleased()


@dataclass(frozen=True)
class SlotReport:
    """One line of :meth:`WorkspaceManager.report`."""

    ubatch: int
    lane: int
    nbytes: int
    generation: int
    graphs: int
    retired_bytes: int


@dataclass(frozen=True)
class Use:
    """One recorded use of scratch (debug mode)."""

    op: str
    lane: int
    ubatch: int
    address: int
    nbytes: int


class WorkspaceManager:
    """Scratch buffers of one device.

    ``is_capturing`` and ``allocate(nbytes, device) -> uint8 tensor`` replace the device's own (for tests and special allocators).
    Thread-safe. A graph's storage is *retired*, never freed, when its slot grows: it goes when the last graph that saw it does.
    """

    def __init__(
        self,
        device: torch.device | str,
        num_lanes: int = 1,
        num_ubatches: int = 1,
        *,
        is_capturing: Callable[[], bool] | None = None,
        allocate: Callable[[int, torch.device], torch.Tensor] | None = None,
        debug: bool | None = None,
    ) -> None:
        if not 1 <= num_lanes <= MAX_LANES or num_ubatches < 1:
            raise WorkspaceError(f"WorkspaceManager: num_lanes must be between 1 and {MAX_LANES} and num_ubatches at least 1, got {num_lanes} and {num_ubatches}.")
        self.device = _normalized(device)
        self._num_lanes, self._num_ubatches = num_lanes, num_ubatches
        self._slots: dict[tuple[int, int], _Buffer] = {}
        self._generations: dict[tuple[int, int], int] = {}
        self._retired: list[_Buffer] = []
        self._locked = False
        self._lockers: weakref.WeakSet[object] = weakref.WeakSet()
        self._unlocked = 0
        self._mutex = threading.RLock()
        self._scopes = threading.local()
        cuda = self.device.type == "cuda"
        self._is_capturing = is_capturing or (torch.cuda.is_current_stream_capturing if cuda else lambda: False)
        self._allocate = allocate or (_allocate_outside_pools if cuda else _allocate)
        self._debug = debug
        self.uses: deque[Use] = deque(maxlen=4096)
        """What ops asked for, newest last (debug mode only)."""

    # What there is

    @property
    def num_lanes(self) -> int:
        return self._num_lanes

    @property
    def num_ubatches(self) -> int:
        return self._num_ubatches

    @property
    def is_locked(self) -> bool:
        return not self._unlocked and (self._locked or len(self._lockers) > 0)

    @property
    def nbytes(self) -> int:
        """Bytes in use by the slots, retired storage not counted."""
        return sum(buffer.nbytes for buffer in self._slots.values())

    @property
    def retired_bytes(self) -> int:
        """Bytes kept only because a captured graph has seen them."""
        self._drop_unleased()
        return sum(buffer.nbytes for buffer in self._retired)

    def generation(self, lane: int = AMBIENT, ubatch: int = AMBIENT) -> int:
        """How often this slot's storage has been replaced; 0 before the first request. Part of the key of a captured graph."""
        return self._generations.get(self._slot(lane, ubatch), 0)

    def generations(self) -> tuple[tuple[tuple[int, int], int], ...]:
        """All generations as ``((ubatch, lane), generation)``, hashable."""
        with self._mutex:
            return tuple(sorted(self._generations.items()))

    def owns(self, address: int) -> bool:
        """Whether ``address`` lies in storage that this manager keeps alive, retired storage included."""
        with self._mutex:
            return any(b.address <= address < b.address + max(b.nbytes, 1) for b in (*self._slots.values(), *self._retired))

    def report(self) -> list[SlotReport]:
        """One entry for each slot that has storage, by ubatch and lane."""
        with self._mutex:
            self._drop_unleased()
            retired: dict[tuple[int, int], int] = {}
            for buffer in self._retired:
                retired[(buffer.ubatch, buffer.lane)] = retired.get((buffer.ubatch, buffer.lane), 0) + buffer.nbytes
            return [SlotReport(u, lane, b.nbytes, b.generation, len(b.leases), retired.get((u, lane), 0)) for (u, lane), b in sorted(self._slots.items())]

    def __repr__(self) -> str:
        state = "locked" if self.is_locked else "open"
        slots = ", ".join(f"ubatch {r.ubatch} lane {r.lane}: {r.nbytes} B" for r in self.report()) or "empty"
        return f"WorkspaceManager({self.device}, {self._num_lanes} lanes, {self._num_ubatches} ubatches, {state}; {slots}; retired {self.retired_bytes} B)"

    # Asking for memory

    def get(self, *specs: tuple[Sequence[int], torch.dtype], lane: int = AMBIENT, ubatch: int = AMBIENT, op: str = "") -> tuple[torch.Tensor, ...]:
        """One contiguous view for each ``(shape, dtype)``, pairwise disjoint, 256-byte aligned, contents undefined.

        The views are valid until the next ``get`` of the same slot. ``op`` names the asker in errors and debug records.
        Raises LaneError (no such lane or ubatch), WorkspaceError (negative size, growth under capture, call while tracing) and
        WorkspaceLockedError (growth while locked).
        """
        _refuse_tracing()
        slot = self._slot(lane, ubatch)
        offsets, total = _layout(specs)
        with self._mutex:
            buffer = self._ensure(slot, total, op)
            if buffer is None:
                return tuple(torch.empty(tuple(shape), dtype=dtype, device=self.device) for shape, dtype in specs)
            scope: GraphLease | None = getattr(self._scopes, "lease", None)
            if scope is not None:
                scope._uses(buffer)
            elif self._is_capturing():
                buffer.pinned = True
            if self.device.type == "cuda":
                stream = torch.cuda.current_stream(self.device)
                buffer.streams[stream.cuda_stream] = stream
            views = tuple(buffer.carve(offset, shape, dtype) for (shape, dtype), offset in zip(specs, offsets, strict=True))
            if envs.debug_workspace() if self._debug is None else self._debug:
                self.record(op or _caller(), views, slot[1], slot[0])
        return views

    def reserve(self, nbytes: int, lane: int | None = None, ubatch: int | None = None) -> None:
        """Make the slots hold at least ``nbytes`` each: all lanes and ubatches unless named. Call before the first capture.

        Raises WorkspaceError (negative size, or inside a capture), WorkspaceLockedError (would grow under a lock), LaneError.
        """
        _refuse_tracing()
        if nbytes < 0:
            raise WorkspaceError(f"workspace reserve: nbytes must be at least 0, got {nbytes}.")
        lanes = range(self._num_lanes) if lane is None else (self._slot(lane, AMBIENT if ubatch is None else ubatch)[1],)
        ubatches = range(self._num_ubatches) if ubatch is None else (self._slot(0, ubatch)[0],)
        with self._mutex:
            for u in ubatches:
                for k in lanes:
                    self._ensure((u, k), _round_up(nbytes), "reserve")

    def lock(self, owner: object | None = None) -> None:
        """Refuse growth from now on. First brings every ubatch of a lane to the lane's largest size.

        With an ``owner`` (a pool of graphs), the lock is the owner's: it ends with it, or by ``unlock(owner)``.
        """
        with self._mutex:
            self._even_out()
            if owner is None:
                self._locked = True
            else:
                self._lockers.add(owner)

    def unlock(self, owner: object | None = None) -> None:
        """Allow growth again: give up the lock of ``owner``, or everyone's. Storage that graphs have seen stays theirs."""
        if owner is not None:
            self._lockers.discard(owner)
        else:
            self._locked = False
            self._lockers.clear()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locked inside; restores the state before."""
        before = self._locked
        self.lock()
        try:
            yield
        finally:
            self._locked = before

    @contextlib.contextmanager
    def unlocked(self) -> Iterator[None]:
        """Growth is allowed inside, whoever has locked."""
        with self._mutex:
            self._unlocked += 1
        try:
            yield
        finally:
            with self._mutex:
                if self._locked or self._lockers:
                    self._even_out()
                self._unlocked -= 1

    def raise_counts(self, num_lanes: int | None = None, num_ubatches: int | None = None) -> None:
        """Allow more lanes or ubatches (never fewer). Costs nothing until they are used.

        Raises LaneError (above ``MAX_LANES``), WorkspaceLockedError.
        """
        lanes, ubatches = max(self._num_lanes, num_lanes or 0), max(self._num_ubatches, num_ubatches or 0)
        if lanes > MAX_LANES:
            raise LaneError(f"workspace on {self.device}: at most {MAX_LANES} lanes, asked for {lanes}.")
        if self.is_locked and (lanes, ubatches) != (self._num_lanes, self._num_ubatches):
            raise WorkspaceLockedError(f"workspace on {self.device} is locked: it has {self._num_lanes} lanes and {self._num_ubatches} ubatches, asked for {lanes} and {ubatches}. Ask before lock().")
        self._num_lanes, self._num_ubatches = lanes, ubatches

    # Captured graphs

    def retain(self, graph: object) -> GraphLease:
        """Keep all storage that the slots have now alive as long as ``graph`` (any object that can be weakly referenced).

        For graphs captured elsewhere; :meth:`capture` also knows which slots the graph used. The lease is released by a finalizer of
        ``graph``, which holds the storage even when the manager itself goes. Synchronize before dropping a graph that may still run.
        """
        lease = GraphLease(self)
        with self._mutex:
            for buffer in self._slots.values():
                lease._uses(buffer)
        return self._tie(lease, graph)

    @contextlib.contextmanager
    def capture(self, graph: object) -> Iterator[GraphLease]:
        """Scope of the capture of ``graph``: ``with manager.capture(g), torch.cuda.graph(g): ...``.

        Inside, growth is refused. Storage that was there on entry is kept as well, because views of it may be used inside.
        Raises WorkspaceError inside another capture scope of this thread.
        """
        if getattr(self._scopes, "lease", None) is not None:
            raise WorkspaceError("workspace capture: this thread is already inside a capture scope. Capture one graph at a time.")
        lease = GraphLease(self)
        with self._mutex:
            for buffer in self._slots.values():
                lease._add(buffer)
        self._scopes.lease = lease
        try:
            yield lease
        except BaseException:
            lease.release()  # half a capture never replays
            raise
        else:
            self._tie(lease, graph)
        finally:
            self._scopes.lease = None

    def _tie(self, lease: GraphLease, graph: object) -> GraphLease:
        weakref.finalize(graph, lease.release).atexit = False
        return lease

    # Debugging

    def record(self, op: str, tensors: Sequence[torch.Tensor], lane: int = AMBIENT, ubatch: int = AMBIENT) -> None:
        """Record that ``op`` uses ``tensors`` as scratch of a lane; WorkspaceError when they lie in another slot's storage.

        Called by :meth:`get` in debug mode (``DSV4_OPS_DEBUG_WORKSPACE=1``), and by whoever passes scratch tensors explicitly.
        """
        ubatch, lane = self._slot(lane, ubatch)
        with self._mutex:
            for tensor in tensors:
                use = Use(op, lane, ubatch, tensor.data_ptr(), _extent(tensor))
                for other in (*self._slots.values(), *self._retired):
                    if (other.ubatch, other.lane) != (ubatch, lane) and use.nbytes and use.address < other.address + other.nbytes and other.address < use.address + use.nbytes:
                        raise WorkspaceError(
                            f"{op}: scratch of lane {lane}, ubatch {ubatch} at {use.address:#x} ({use.nbytes} bytes) lies in the storage of lane {other.lane}, "
                            f"ubatch {other.ubatch}. Ask the manager for scratch in the lane that uses it."
                        )
                self.uses.append(use)

    # Inside

    def _slot(self, lane: int, ubatch: int) -> tuple[int, int]:
        lane = resolve_lane(lane)
        ubatch = current_ubatch() if ubatch == AMBIENT else ubatch
        if lane >= self._num_lanes:
            raise LaneError(f"workspace on {self.device} has {self._num_lanes} lane(s), asked for lane {lane}. Create it with num_lanes={lane + 1}, or call workspace_manager(device, num_lanes={lane + 1}) first.")
        if not 0 <= ubatch < self._num_ubatches:
            raise LaneError(f"workspace on {self.device} has {self._num_ubatches} ubatch(es), asked for ubatch {ubatch}. Create it with num_ubatches={ubatch + 1}.")
        return ubatch, lane

    def _even_out(self) -> None:
        """Bring every ubatch of a lane to the lane's largest size, so that one that warm-up did not use still works."""
        for lane in range(self._num_lanes):
            largest = max((b.nbytes for (_, k), b in self._slots.items() if k == lane), default=0)
            if largest:
                self.reserve(largest, lane=lane)

    def _ensure(self, slot: tuple[int, int], nbytes: int, op: str) -> _Buffer | None:
        self._drop_unleased()
        current = self._slots.get(slot)
        have = current.nbytes if current is not None else 0
        if nbytes <= have:
            return current
        ubatch, lane = slot
        what = f"workspace of lane {lane}, ubatch {ubatch} on {self.device} holds {have} bytes, asked for {nbytes} by {op or _caller()}"
        if getattr(self._scopes, "lease", None) is not None or self._is_capturing():
            raise WorkspaceError(f"{what} during a CUDA graph capture: it cannot grow there, its memory would belong to the graph. Run the step once before capturing, or call reserve({nbytes}, lane={lane}).")
        if self.is_locked:
            raise WorkspaceLockedError(f"{what}, but it is locked and cannot grow: captured graphs hold its address. Reserve the largest step before lock(): reserve({nbytes}, lane={lane}).")
        with torch.inference_mode(False):
            storage = self._allocate(nbytes + ALIGNMENT, self.device)
        address = _round_up(storage.data_ptr())
        generation = self._generations.get(slot, 0) + 1
        buffer = _Buffer(storage, address, nbytes, lane, ubatch, generation)
        self._slots[slot], self._generations[slot] = buffer, generation
        logger.debug("workspace of lane %d, ubatch %d on %s: %d bytes, before %d, for %s", lane, ubatch, self.device, nbytes, have, op or "its caller")
        if current is not None:
            self._retired.append(current)
            self._drop_unleased()
        return buffer

    def _drop_unleased(self) -> None:
        # Finalizers come here from any thread, also from the one that _allocate_outside_pools waits for: never block.
        if not self._retired or not self._mutex.acquire(blocking=False):
            return  # the next request, report or release does it
        try:
            kept = []
            for buffer in self._retired:
                if buffer.leases or buffer.pinned:
                    kept.append(buffer)
                else:
                    buffer.release()
            self._retired = kept
        finally:
            self._mutex.release()


class CapturedGraphs:
    """Captured graphs by key (usually the capture size). One whose scratch has moved since is a miss, never replayed.

    Its storage would still be alive, but the ops that ran before it in the step have left their data in the new storage.
    """

    def __init__(self, manager: WorkspaceManager) -> None:
        self.manager = manager
        self._entries: dict[Hashable, tuple[Any, GraphLease]] = {}

    @contextlib.contextmanager
    def capture(self, key: Hashable, graph: Any) -> Iterator[GraphLease]:
        """Capture ``graph`` under ``key``; kept only when the capture succeeds."""
        with self.manager.capture(graph) as lease:
            yield lease
        self._entries[key] = (graph, lease)

    def get(self, key: Hashable) -> Any | None:
        """The graph of ``key``, or None when there is none or its scratch has moved (then it is dropped: capture again)."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if not entry[1].is_current:
            del self._entries[key]
            return None
        return entry[0]

    def lease(self, key: Hashable) -> GraphLease | None:
        """The hold on scratch of the graph of ``key``, moved or not."""
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        self._entries.clear()


_managers: dict[torch.device, WorkspaceManager] = {}
_managers_mutex = threading.Lock()


def _normalized(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def workspace_manager(device: torch.device | str, num_lanes: int | None = None, num_ubatches: int | None = None) -> WorkspaceManager:
    """The manager that this package's ops use on ``device``; made at the first call (2 lanes, 1 ubatch, no bytes unless asked).

    Larger counts raise those of an existing manager (refused while it is locked).
    """
    key = _normalized(device)
    with _managers_mutex:
        manager = _managers.get(key)
        if manager is None:
            manager = _managers[key] = WorkspaceManager(key, num_lanes or 2, num_ubatches or 1)
    manager.raise_counts(num_lanes, num_ubatches)
    return manager


def set_workspace_manager(device: torch.device | str, manager: WorkspaceManager | None) -> WorkspaceManager | None:
    """Make ops on ``device`` use ``manager`` (None: a new default at the next call). Returns the one before."""
    key = _normalized(device)
    with _managers_mutex:
        before = _managers.pop(key, None)
        if manager is not None:
            _managers[key] = manager
    return before


def _round_up(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


def _layout(specs: Sequence[tuple[Sequence[int], torch.dtype]]) -> tuple[list[int], int]:
    offsets, total = [], 0
    for shape, dtype in specs:
        size = dtype.itemsize
        for extent in shape:
            if extent < 0:
                raise WorkspaceError(f"workspace request: sizes must be at least 0, got shape {list(shape)}.")
            size *= extent
        offsets.append(total)
        total += _round_up(size)
    return offsets, total


def _extent(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _allocate_outside_pools(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate on a thread of its own: memory pools (``use_mem_pool``, warm-up of CUDA graph trees) hold for the thread that entered them.

    A workspace outlives any pool that happens to be active when it is first used.
    """
    result: list[torch.Tensor] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(_allocate(nbytes, device))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="dsv4_ops-workspace")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def _refuse_tracing() -> None:
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if fake or torch.compiler.is_compiling():
        raise WorkspaceError("the workspace was asked for memory while tracing (fake tensors): only an op's real kernel may ask, its fake returns new_empty outputs.")


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
