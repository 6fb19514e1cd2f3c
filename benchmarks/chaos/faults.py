"""The kinds of fault: how each is injected, and which sign shows recovery."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from chaos import signs
from chaos.site import Site, wait_for
from chaos.store import FAKETIME
from chaos.view import Sign, View
from chaos.world import MOOD, set_mood

SERVICES = (
    *("gateway", "controller", "experience", "environment", "reward"),
    *("rollout", "trainer", "store", "tracking"),
)
FREEZES_S = (0.5, 2.0, 5.0)
LONG_FREEZES_S = (*FREEZES_S, 12.0)
SHIFTS_S = {"forwards": (5.0, 90.0, 3600.0), "backwards": (-5.0, -90.0, -3600.0)}
HELD_S = 0.5
PAUSE_S = 0.4
"""Between an answer and the next turn, in the job's environment."""


@dataclass(slots=True)
class Scene:
    """The target of faults: an installation and its current job."""

    site: Site
    view: View
    chance: random.Random
    job_id: str
    freezes_s: tuple[float, ...] = FREEZES_S
    forgets: bool = False  # the store has lost acknowledged writes
    shift_s: float = 0.0  # offset of the store's clock

    def pid(self, name: str) -> int:
        """Process id; 0 if it does not run."""
        return self.site.pid_of(name)

    def trainer(self) -> str:
        """Name of the trainer process."""
        return f"trainer-{self.job_id}"

    def incarnation(self) -> int:
        """Incarnation of the newest trainer that received a batch."""
        found = [e for e in self.view.events if e["event"] == "batch" and e["job"] == self.job_id]
        return max((int(event["incarnation"]) for event in found), default=0)


@dataclass(slots=True)
class Injected:
    """An injected fault; times are wall-clock times."""

    kind: str
    about: str  # details
    began: float
    counts_from: float  # start of the recovery time: the beginning, or the end of a lasting fault
    sign: Sign | None = None
    restarts: str = ""  # process whose restart is measured separately
    damaged: str = ""  # checkpoint
    job_id: str = ""
    recovered_s: float | None = None
    restart_s: float | None = None
    late: bool = False  # no sign in time


Inject = Callable[[Scene], Injected | None]


def kinds() -> dict[str, Inject]:
    """All kinds that can be injected on this machine."""
    made: dict[str, Inject] = {}
    for service in SERVICES:
        made[f"kill {service}"] = _bound(kill, service)
        made[f"freeze {service}"] = _bound(freeze, service)
    made["store out of memory"] = out_of_memory
    made["store loses its last second"] = lost_second
    made["disk full"] = disk_full
    if FAKETIME.exists():
        for way in SHIFTS_S:
            made[f"store clock {way}"] = _bound(clock_jump, way)
    for how in ("bytes", "length"):
        made[f"checkpoint damaged, {how}"] = _bound(damaged_checkpoint, how)
    for how in ("cut", "slow", "reset"):
        made[f"network {how}"] = _bound(network, how)
    for of in ("environment", "reward"):
        for mood in ("raise", "hang", "garbage", "exit"):
            made[f"{of} plug-in: {mood}"] = _bound(plugin, f"{of}:{mood}")
    return made


def not_injected(site: Site) -> list[str]:
    """Kinds that this machine does not support, with reasons."""
    found: list[str] = []
    if not FAKETIME.exists():
        found.append("jumps of the store's clock: libfaketime is not installed")
    if not site.has_disk:
        found.append("full disk: only root can mount a small file system")
    return found


def kill(scene: Scene, service: str) -> Injected | None:
    """Send SIGKILL to a process."""
    name = _victim(scene, service)
    pid = scene.pid(name)
    if not pid:
        return None
    aim = _aim(scene, service, name, pid)
    if service == "rollout":
        # A request takes milliseconds: freeze the worker first so that it dies with requests.
        os.kill(pid, signal.SIGSTOP)
        time.sleep(HELD_S)
    began = time.time()
    os.kill(pid, signal.SIGKILL)
    sign = aim(began)
    done = Injected(f"kill {service}", name, began, began, sign)
    if service in ("rollout", "trainer"):
        done.restarts = name
    return done


def freeze(scene: Scene, service: str) -> Injected | None:
    """Send SIGSTOP to a process, and SIGCONT after a while."""
    name = _victim(scene, service)
    pid = scene.pid(name)
    if not pid:
        return None
    seconds = scene.chance.choice(scene.freezes_s)
    began = time.time()
    view, job = scene.view, scene.job_id
    moves = service in ("environment", "rollout")
    if service == "environment":
        elsewhere = signs.episodes_go_on(view, {pid}, began)
    else:
        elsewhere = signs.all_answered(view, began, pause_s=PAUSE_S)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
    ended = time.time()
    if moves:
        sign = elsewhere
    elif service == "gateway":
        sign = signs.answers(scene.site.client, job, time.time)
    elif service in ("controller", "tracking"):
        sign = None
    else:
        sign = signs.committed(view, ended, job)
    counts_from = began if moves else ended
    return Injected(f"freeze {service}", f"{name}, {seconds:g} s", began, counts_from, sign)


def out_of_memory(scene: Scene) -> Injected | None:
    """Make the store refuse writes for a while."""
    store = scene.site.store
    seconds = scene.chance.choice((2.0, 4.0))
    began = time.time()
    store.set(maxmemory_policy="noeviction", maxmemory=max(store.used_bytes() // 2, 1 << 20))
    time.sleep(seconds)
    store.set(maxmemory=0)
    ended = time.time()
    sign = signs.committed(scene.view, ended, scene.job_id)
    return Injected("store out of memory", f"{seconds:g} s", began, ended, sign)


def lost_second(scene: Scene) -> Injected | None:
    """Simulate a power failure: kill the store and truncate its last second of writes."""
    store, began = scene.site.store, time.time()
    lost_s = scene.chance.uniform(0.2, 1.0)
    with store.held():
        os.kill(store.pid, signal.SIGKILL)
        wait_for(lambda: not _runs(store.pid), 10.0, every_s=0.02)
        lost = store.cut(lost_s=lost_s)
    scene.forgets = True
    sign = signs.committed(scene.view, time.time(), scene.job_id)
    about = f"{lost} bytes of {lost_s:.1f} s"
    return Injected("store loses its last second", about, began, time.time(), sign)


def disk_full(scene: Scene) -> Injected | None:
    """Fill the file system of the run directory, which includes the store's file."""
    if not scene.site.has_disk:
        return None
    seconds = scene.chance.choice((1.0, 3.0))
    began = time.time()
    ballast = scene.site.fill_disk()
    try:
        time.sleep(seconds)
    finally:
        ballast.unlink()
    ended = time.time()
    sign = signs.committed(scene.view, ended, scene.job_id)
    return Injected("disk full", f"{seconds:g} s", began, ended, sign)


def clock_jump(scene: Scene, way: str) -> Injected | None:
    """Shift the store's wall clock permanently."""
    jump = scene.chance.choice(SHIFTS_S[way])
    scene.shift_s += jump
    began = time.time()
    scene.site.store.shift_clock(scene.shift_s)
    time.sleep(1.5)  # libfaketime reads the offset once per second
    sign = signs.committed(scene.view, began + 1.5, scene.job_id)
    return Injected(f"store clock {way}", f"{jump:+g} s", began, began, sign)


def damaged_checkpoint(scene: Scene, how: str) -> Injected | None:
    """Damage the newest checkpoint and kill the trainer, which then has to load one."""
    folder = scene.site.run_dir / "jobs" / scene.job_id / "checkpoints"
    whole = sorted(path.parent for path in folder.glob("step-*/paceline.json"))
    if not whole or not scene.pid(scene.trainer()):
        return None
    files = sorted(whole[-1].glob("*.safetensors"), key=lambda path: path.stat().st_size)
    if not files:
        return None
    size = files[-1].stat().st_size
    killed = kill(scene, "trainer")
    if how == "bytes":
        _flip(files[-1], size // 2, 64)
    else:
        os.truncate(files[-1], size // 2)
    if killed is None:
        return None
    killed.kind = f"checkpoint damaged, {how}"
    killed.about, killed.damaged = whole[-1].name, whole[-1].name
    return killed


def network(scene: Scene, how: str) -> Injected | None:
    """Hold, delay or reset the connections to experience."""
    relay, began = scene.site.relay, time.time()
    about = ""
    if how == "cut":
        seconds = scene.chance.choice((1.0, 4.0, 8.0))
        relay.hold()
        time.sleep(seconds)
        relay.release()
        about = f"{seconds:g} s"
    elif how == "slow":
        delay_s = scene.chance.choice((0.05, 0.2))
        relay.slow(delay_s)
        time.sleep(4.0)
        relay.slow(0.0)
        about = f"each chunk delayed by {delay_s:g} s, for 4 s"
    else:
        share = scene.chance.choice((0.0, 0.5, 1.0))
        relay.reset(share, scene.chance)
        about = f"{share:.0%} of the connections, at least one"
    ended = time.time()
    sign = signs.committed(scene.view, ended, scene.job_id)
    return Injected(f"network {how}", about, began, ended, sign)


def plugin(scene: Scene, what: str) -> Injected | None:
    """Make calls to a plug-in of the job fail for a while."""
    of, _, how = what.partition(":")
    share = {"raise": 0.5, "garbage": 0.5, "hang": 0.2, "exit": 0.5}[how]
    began, seconds = time.time(), 2.0
    set_mood(scene.site.notes, of=of, how=how, until=began + seconds, share=share)
    time.sleep(seconds)
    (scene.site.notes / MOOD).unlink(missing_ok=True)
    ended = time.time()
    sign = signs.committed(scene.view, ended, scene.job_id)
    return Injected(f"{of} plug-in: {how}", f"{share:.0%} of calls", began, ended, sign)


def _victim(scene: Scene, service: str) -> str:
    """Name of the target process; among environment workers, the one with most episodes."""
    scene.view.look()
    scene.view.forget_dead()
    if service == "trainer":
        return scene.trainer()
    if service == "rollout":
        return scene.chance.choice(scene.site.names(f"rollout-{scene.job_id}") or ["rollout"])
    if service == "environment":
        names = scene.site.names("environment")
        return max(names, key=lambda name: len(scene.view.open_at({scene.pid(name)})))
    if service == "reward":
        return scene.chance.choice(scene.site.names("reward"))
    return "tracking-0" if service == "tracking" else service


def _aim(scene: Scene, service: str, name: str, pid: int) -> Callable[[float], Sign | None]:
    """Record the state before the fault; returns a function from its time to the sign."""
    view, job, client = scene.view, scene.job_id, scene.site.client
    family, incarnation = _family(pid), scene.incarnation()

    def again() -> int:
        return scene.pid(name)

    def sign(at: float) -> Sign | None:
        match service:
            case "environment":
                return signs.episodes_elsewhere(view, {pid}, at)
            case "reward":
                return signs.scores_elsewhere(view, family, at)
            case "rollout":
                return signs.all_answered(view, at, pause_s=PAUSE_S)
            case "experience":
                return signs.new_episode(view, at, again, pid)
            case "trainer":
                return signs.committed(view, at, job, after=incarnation)
            case "gateway":
                return signs.answers(client, job, time.time)
            case "store":
                return signs.committed(view, at, job)
            case _:
                return signs.process_again(again, pid)

    return sign


def _family(pid: int) -> set[int]:
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return {pid}
    return {pid, *(each.pid for each in below)}


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _flip(path: Path, start: int, count: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        old = file.read(count)
        file.seek(start)
        file.write(bytes(byte ^ 0xFF for byte in old))


def _bound(inject: Callable[[Scene, str], Injected | None], what: str) -> Inject:
    return lambda scene: inject(scene, what)
