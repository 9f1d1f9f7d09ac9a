"""``slow_network``: which host, link or network, what it costs; and the many networks that are none of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from example_counts import examples
from fakes.cluster import ANCHOR_WALL_NS, Cluster, slow_at
from fakes.samples import with_samples
from fakes.traffic import Exchange, SlowLink, Traffic
from fakes.wires import Trouble, Wires, with_probes
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.diagnosis import diagnose
from stepscope.diagnosis.engine.readings import ProbeSamples, network_faults, probe_samples, round_trips_of
from stepscope.diagnosis.engine.view import view_of
from stepscope.diagnosis.engine.window import build_window
from stepscope.diagnosis.hysteresis import evaluate
from stepscope.records.finding import Finding
from stepscope.records.series import RunData

PHASES = {"input": 5.0, "forward": 25.0, "backward": 50.0, "optimizer": 10.0, "other": 3.0}
GBIT = 125_000_000.0


def job(hosts: int = 4, steps: int = 600, **how: Any) -> Cluster:
    """Two ranks a host; a step takes a tenth of a second."""
    return Cluster(**{"ranks": 2 * hosts, "hosts": hosts, "steps": steps, "phases_ms": PHASES, "comm_ms": 5.0, **how})


def slower(cluster: Cluster, ms: float, steps: range | None = None, phase: str = "comm") -> Cluster:
    """The same on all ranks."""
    return replace(cluster, faults=tuple(slow_at(rank, phase, ms, steps) for rank in range(cluster.ranks)))


def network(run: RunData) -> list[Finding]:
    return [finding for finding in diagnose(run) if finding.kind == "slow_network"]


def alarms(run: RunData) -> list[tuple[str, str]]:
    return [(finding.kind, finding.severity) for finding in diagnose(run) if finding.severity != "info"]


# -- who ------------------------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("hosts", [3, 4, 9])
@pytest.mark.parametrize("which", [{"rtt_us": 20_000.0}, {"loss": 0.08}])
def test_a_bad_host_is_named_and_without_a_price_it_is_information(hosts: int, which: dict[str, float]) -> None:
    run = with_probes(job(hosts).run(), Wires(troubles=(Trouble(hosts=(2,), **which),)))
    (found,) = network(run)
    assert (found.severity, found.ranks, found.phase) == ("info", (4, 5), "comm")
    assert (found.evidence["where"], found.evidence["hosts"]) == ("host", ["node2"])
    assert found.cost["share"] == 0.0
    assert found.title.startswith("The network of host node2 ")
    assert found.title.endswith("; the steps are not affected.")
    assert diagnose(run)[0].kind == "healthy"


def test_figures_and_words_of_latency() -> None:
    (found,) = network(with_probes(job().run(), Wires(jitter=0.0, troubles=(Trouble(hosts=(1,), rtt_us=19_850.0),))))
    assert (found.evidence["rtt_us"], found.evidence["others_rtt_us"]) == (20_000.0, 150.0)
    assert found.title == (
        "The network of host node1 is slow: a round trip takes 20.0 ms, elsewhere 150 µs; the steps are not affected."
    )
    assert found.steps == (1, 599)
    assert found.advice[0].startswith("Check what else uses node1's link")


def test_a_single_bad_way_is_a_link_with_both_hosts() -> None:
    for which in ({"rtt_us": 5000.0}, {"loss": 0.15}):
        (found,) = network(with_probes(job().run(), Wires(troubles=(Trouble(hosts=(1, 2), **which),))))
        assert (found.evidence["where"], found.evidence["hosts"]) == ("link", ["node1", "node2"])
        assert (found.severity, found.ranks) == ("info", (2, 3, 4, 5))
        assert found.title.startswith("The link between node1 and node2 ")


def test_two_bad_hosts_are_one_finding() -> None:
    troubles = (Trouble(hosts=(1,), rtt_us=4000.0), Trouble(hosts=(3,), rtt_us=9000.0))
    (found,) = network(with_probes(job(6).run(), Wires(troubles=troubles)))
    assert found.evidence["hosts"] == ["node3", "node1"]
    assert found.ranks == (2, 3, 6, 7)
    assert found.title.startswith("The network of host node3 (and of 1 more host) is slow")


def test_with_two_hosts_it_is_the_link_until_a_counter_tells_whose() -> None:
    wires = Wires(troubles=(Trouble(hosts=(1,), loss=0.1),))
    (found,) = network(with_probes(job(2).run(), wires))
    assert (found.evidence["where"], found.evidence["hosts"]) == ("link", ["node0", "node1"])
    assert found.evidence["others_loss_share"] is None
    speeds = {"net_speed_bps": lambda host, at: GBIT if host else 25 * GBIT, "tcp_out_ps": 100.0}
    (found,) = network(with_probes(with_samples(job(2), host=speeds), wires))
    assert (found.evidence["where"], found.evidence["hosts"]) == ("host", ["node1"])
    assert (found.evidence["speed_bps"], found.evidence["others_speed_bps"]) == (GBIT, 25 * GBIT)


def test_a_link_at_a_lower_speed_needs_no_probe() -> None:
    host = {"net_speed_bps": lambda host, at: GBIT if host == 1 else 25 * GBIT, "tcp_out_ps": 100.0}
    (found,) = network(with_samples(job(3), host=host))
    assert found.title == (
        "The network of host node1 is slow: its link runs at 1 Gbit/s, that of the others at 25 Gbit/s; "
        "the steps are not affected."
    )
    assert (found.severity, found.ranks) == ("info", (2, 3))
    infiniband = {"ib_speed_bps": 400 * GBIT}
    assert network(with_samples(job(3), host={**host, **infiniband})) == []  # Ethernet is for logging in


def test_what_the_kernel_counts_is_told_beside_the_probes() -> None:
    host = {
        "tcp_out_ps": 1000.0,
        "tcp_retrans_ps": lambda host, at: 60.0 if host == 1 else 0.1,
        "net_errors_ps": lambda host, at: 12.0 if host == 1 else 0.0,
    }
    run = with_probes(with_samples(job(), host=host), Wires(troubles=(Trouble(hosts=(1,), loss=0.1),)))
    (found,) = network(run)
    assert found.evidence["retransmit_share"] == 0.06
    assert found.advice[0] == (
        "Its kernel counters agree: 12.0 errors a second on its interfaces, 6% of its TCP segments retransmitted."
    )
    calm = with_probes(with_samples(job(), host=host), Wires())
    assert network(calm) == []  # by themselves they say nothing


# -- what it costs --------------------------------------------------------------------------------------------------


def test_the_price_is_what_exchanges_take_beyond_before() -> None:
    cluster = slower(job(), 40.0, range(200, 440))
    wires = Wires(troubles=(Trouble(hosts=(2,), rtt_us=20_000.0, seconds=(20.0, 53.6)),))
    (found,) = network(with_probes(cluster.run(), wires))
    assert (found.severity, found.ranks) == ("warning", (4, 5))
    assert found.evidence["compared"] == "before"
    assert found.evidence["excess_ms"] == pytest.approx(40.0, rel=0.01)
    assert found.cost["share"] == pytest.approx(240 * 0.040 / (599 * 0.0996 + 240 * 0.040), rel=0.05)
    first, last = found.steps or (0, 0)
    assert 200 <= first <= 205 and 435 <= last <= 439
    assert alarms(with_probes(cluster.run(), wires)) == [("slow_network", "warning")]  # told once


def test_loss_that_hits_one_step_in_six() -> None:
    cluster = slower(job(), 200.0, range(200, 440, 6))
    run = with_probes(cluster.run(), Wires(troubles=(Trouble(hosts=(1,), loss=0.1, seconds=(20.0, 52.0)),)))
    found = network(run)[0]
    assert (found.severity, found.evidence["hosts"]) == ("warning", ["node1"])
    assert found.evidence["excess_ms"] == pytest.approx(200.0, rel=0.02)
    assert 36 <= found.evidence["steps_hit"] <= 40
    assert f"; in {found.evidence['steps_hit']} steps exchanges take 200 ms longer, " in found.title
    assert [kind for kind, _ in alarms(run)] == ["slow_network"]


def test_what_hides_in_everybodys_backward_is_found_too() -> None:
    cluster = slower(job(comm_measured=False), 40.0, range(200, 440), phase="backward")
    run = with_probes(cluster.run(), Wires(troubles=(Trouble(hosts=(1,), rtt_us=9000.0, seconds=(20.0, 53.6)),)))
    found = network(run)[0]
    assert (found.severity, found.ranks) == ("warning", (2, 3))
    assert [kind for kind, _ in alarms(run)] == ["slow_network"]
    without = alarms(cluster.run())
    assert without and without[0][0] != "slow_network"  # a mystery


def test_bad_from_the_first_step_to_the_last_takes_what_comm_bound_would() -> None:
    cluster = slower(job(), 60.0)
    run = with_probes(cluster.run(), Wires(troubles=(Trouble(hosts=(1,), loss=0.08),)))
    assert alarms(cluster.run()) == [("comm_bound", "warning")]
    assert alarms(run) == [("slow_network", "critical")]
    (found,) = network(run)
    assert found.evidence["compared"] == "comm_bound"
    assert found.confidence == 0.7
    assert 0.3 < found.cost["share"] < 0.41


def test_a_little_more_latency_does_not_explain_a_lot_of_waiting() -> None:
    run = with_probes(slower(job(), 60.0).run(), Wires(troubles=(Trouble(hosts=(1,), rtt_us=700.0),)))
    (found,) = network(run)
    most_ms = (2 * 7 + 10) * 0.7
    assert found.evidence["excess_ms"] == pytest.approx(most_ms, rel=0.05)
    assert ("comm_bound", "warning") in alarms(run)


def test_the_whole_network_is_told_only_if_it_costs() -> None:
    trouble = Trouble(rtt_us=5000.0, seconds=(20.0, 53.6))
    assert network(with_probes(job().run(), Wires(troubles=(trouble,)))) == []
    (found,) = network(with_probes(slower(job(), 40.0, range(200, 440)).run(), Wires(troubles=(trouble,))))
    assert (found.severity, found.ranks, found.evidence["where"]) == ("warning", (), "network")
    assert found.title.startswith("The network between all hosts is slow: a round trip takes 5.1")
    lossy = Wires(troubles=(Trouble(loss=0.1, seconds=(20.0, 53.6)),))
    assert network(with_probes(job().run(), lossy)) == []
    (found,) = network(with_probes(slower(job(), 40.0, range(200, 440)).run(), lossy))
    assert (found.evidence["where"], found.evidence["what"]) == ("network", "loss")


def test_a_slow_group_and_the_host_in_it_are_one_cause() -> None:
    traffic = Traffic(
        mesh={"dp": 2, "tp": 4},
        exchanges=(Exchange(dimension="dp", op="all_reduce", ms=10.0, mb=8.0),),
        faults=(SlowLink(ranks=(2,), times=4.0, dimension="dp"),),
    )
    cluster = job(4, ranks=8, traffic=traffic)
    (alone,) = [f for f in diagnose(cluster.run()) if f.kind in ("slow_collective", "comm_straggler")]
    run = with_probes(cluster.run(), Wires(troubles=(Trouble(hosts=(1,), loss=0.1),)))
    (found,) = network(run)
    assert found.evidence["hosts"] == ["node1"]
    assert found.evidence["explains"] == [alone.kind]
    assert found.cost["share"] == pytest.approx(alone.cost["share"], rel=0.01)
    assert {kind for kind, _ in alarms(run)} == {"slow_network"}
    elsewhere = with_probes(cluster.run(), Wires(troubles=(Trouble(hosts=(2,), loss=0.1),)))
    assert alone.kind in {kind for kind, _ in alarms(elsewhere)}  # ranks 2 and 6 are on node1 and node3
    assert network(elsewhere)[0].severity == "info"


def test_a_late_rank_is_not_the_networks() -> None:
    cluster = job(faults=(slow_at(5, "forward", 40.0, range(200, 440)),))
    run = with_probes(cluster.run(), Wires(troubles=(Trouble(hosts=(1,), rtt_us=9000.0, seconds=(20.0, 53.6)),)))
    (found,) = network(run)
    assert (found.severity, found.cost["share"]) == ("info", 0.0)
    assert [kind for kind, _ in alarms(run)] == ["compute_straggler"]


def test_live_it_is_shown_and_after_healing_withdrawn() -> None:
    whole = with_probes(
        slower(job(steps=1200), 40.0, range(300, 600)).run(),
        Wires(troubles=(Trouble(hosts=(2,), rtt_us=20_000.0, seconds=(30.0, 72.0)),)),
    )
    watched: tuple[Any, ...] = ()
    changes = []
    for last in range(250, 1200, 25):
        ranks = (replace(rank, steps=rank.steps.part(slice(last)), state="running") for rank in whole.ranks)
        run = replace(whole, ranks=tuple(ranks))
        now_ns = ANCHOR_WALL_NS + int((last * 0.0996 + min(max(last - 300, 0), 300) * 0.04) * 1e9)
        seen = tuple(line for line in whole.samples if line["wall_ns"] <= now_ns)
        watched, changed = evaluate(replace(run, samples=seen), watched)
        changes += [(change.what, change.step) for change in changed if change.finding.kind == "slow_network"]
    assert [what for what, _ in changes if what != "worse"] == ["shown", "withdrawn"]
    (shown,) = [step for what, step in changes if what == "shown"]
    (gone,) = [step for what, step in changes if what == "withdrawn"]
    assert 400 <= shown <= 600 < gone


# -- what is none ---------------------------------------------------------------------------------------------------


@settings(max_examples=examples(25))
@given(
    hosts=st.integers(2, 6),
    rtt_us=st.sampled_from([40.0, 200.0, 2000.0, 20_000.0]),
    jitter=st.floats(0.0, 0.7),
    loss=st.floats(0.0, 0.002),
    seed=st.integers(0, 10_000),
)
def test_a_healthy_network_however_jittery_says_nothing(
    hosts: int, rtt_us: float, jitter: float, loss: float, seed: int
) -> None:
    wires = Wires(rtt_us=rtt_us, jitter=jitter, loss=loss, seed=seed)
    assert network(with_probes(Cluster(ranks=hosts, hosts=hosts, steps=300, phases_ms=PHASES).run(), wires)) == []


@settings(max_examples=examples(20))
@given(
    hosts=st.integers(2, 6),
    which=st.sampled_from([(), (1,), (0, 1)]),
    start_s=st.floats(0.0, 28.0),
    kind=st.sampled_from([{"loss": 1.0}, {"rtt_us": 900_000.0}, {"loss": 0.5, "rtt_us": 100_000.0}]),
    seed=st.integers(0, 10_000),
)
def test_one_bad_second_says_nothing(
    hosts: int, which: tuple[int, ...], start_s: float, kind: dict[str, float], seed: int
) -> None:
    trouble = Trouble(hosts=which, seconds=(start_s, start_s + 1.0), **kind)
    wires = Wires(seed=seed, troubles=(trouble,))
    assert network(with_probes(Cluster(ranks=hosts, hosts=hosts, steps=300, phases_ms=PHASES).run(), wires)) == []


def test_an_agent_that_is_gone_is_no_lossy_host() -> None:
    for second in (15.0, 30.0, 45.0, 58.0):
        assert network(with_probes(job().run(), Wires(silent={2: second}))) == []
        assert network(with_probes(job(2).run(), Wires(silent={1: second}))) == []


def test_a_firewall_is_no_loss() -> None:
    """Nothing comes back to one host, though it answers the others."""
    run = with_probes(job().run(), Wires())
    blocked = tuple(
        {**{k: v for k, v in line.items() if not k.startswith("rtt")}, "lost": line["sent"]}
        if line["node"] == "node1"
        else line
        for line in run.samples
    )
    assert network(replace(run, samples=blocked)) == []
    nobody = tuple({**line, "lost": line["sent"]} for line in run.samples)
    assert network(replace(run, samples=nobody)) == []


def test_one_host_or_no_steps_say_nothing() -> None:
    wires = Wires(troubles=(Trouble(hosts=(1,), loss=0.3),))
    assert network(with_probes(job(4, steps=5).run(), wires)) == []
    assert network(with_probes(Cluster(ranks=2, steps=300, phases_ms=PHASES).run(), wires)) == []


@settings(max_examples=examples(20))
@given(st.data())
def test_fuzz_probe_lines(data: st.DataObject) -> None:
    value = st.one_of(st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=3))
    keys = ("wall_ns", "node", "peer", "sent", "lost", "rtt_us_p50")
    run = with_probes(job(3, steps=100).run(), Wires(every_s=1.0))
    lines = [dict(line) for line in run.samples]
    for _ in range(data.draw(st.integers(1, 30))):
        line = lines[data.draw(st.integers(0, len(lines) - 1))]
        line[data.draw(st.sampled_from(keys))] = data.draw(value)
    diagnose(replace(run, samples=tuple(lines)))


# -- the ways themselves --------------------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(st.integers(2, 5), st.integers(1, 200), st.integers(0, 1000))
def test_nothing_is_counted_twice_and_hosts_may_be_renumbered(hosts: int, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    sent = random.integers(1, 9, count).astype(np.float64)
    heard = ProbeSamples(
        wall_ns=1e18 + random.uniform(0, 60e9, count),
        node=random.integers(0, hosts, count).astype(np.intp),
        peer=random.integers(0, hosts, count).astype(np.intp),
        sent=sent,
        lost=np.floor(sent * random.random(count)),
        rtt_us=random.uniform(10, 1000, count),
    )
    trips = round_trips_of(heard, hosts)
    if trips is None:
        return
    assert trips.sent.sum() <= sent[heard.node != heard.peer].sum()
    assert (trips.lost <= trips.sent).all()
    assert (trips.ends[:, 0] < trips.ends[:, 1]).all()
    turned = round_trips_of(replace(heard, node=hosts - 1 - heard.node, peer=hosts - 1 - heard.peer), hosts)
    assert turned is not None
    assert turned.sent.sum() == trips.sent.sum()
    names = [sorted(hosts - 1 - host for host in bad.hosts) for bad in network_faults(turned)]
    assert sorted(names) == sorted(sorted(bad.hosts) for bad in network_faults(trips))


def test_lines_of_hosts_without_ranks_do_not_count() -> None:
    run = with_probes(job(3).run(), Wires())
    stranger = {**run.samples[0], "peer": "login-node", "lost": run.samples[0]["sent"]}
    assert len(probe_samples(view_of(build_window(replace(run, samples=(*run.samples, stranger))))).sent) == len(
        probe_samples(view_of(build_window(run))).sent
    )
