"""A fleet document as the hub serves it, for tests of the page: a year of weeks, with everything that is drawn."""

from __future__ import annotations

from typing import Any

__all__ = ["fleet_document"]

BEGIN_NS = 1_767_571_200 * 10**9
"""Monday, 5 January 2026."""
WEEK_NS = 7 * 86_400 * 10**9
CAUSES = {
    "useful": "useful training",
    "slow_rank": "waiting for a slow rank",
    "input": "waiting for input",
    "exchange": "exchange between ranks",
    "hangs": "hangs",
    "crashes": "crashes and restarts",
    "lost_steps": "steps made twice",
    "start_up": "start-up",
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "stalls": "stalls",
    "shutdown": "shutdown",
    "unknown": "not recorded",
}
SHARES = (0.71, 0.091, 0.06, 0.04, 0.02, 0.015, 0.012, 0.02, 0.01, 0.012, 0.004, 0.001, 0.005)


def fleet_document(*runs: str, evil: str = "<b>x</b>") -> dict[str, Any]:
    """``runs``: the ids that rows lead to; ``evil``: a name that must stay text."""
    behind = {"run_count": len(runs) + 40, "runs": list(runs)}

    def hours(total: float, turn: int = 0) -> dict[str, Any]:
        shares = [share * (1 + (turn * (at + 3) % 7) / 5) if at else share for at, share in enumerate(SHARES)]
        scale = total / sum(shares)
        return {
            "gpu_hours": total,
            "by_cause": {cause: share * scale for cause, share in zip(CAUSES, shares, strict=True)},
            **behind,
        }

    def rows(*names: str) -> list[dict[str, Any]]:
        return [
            {"key": name, "name": name, "useful_share": 0.7 - at / 50, **hours(40_000.0 / (at + 1), at)}
            for at, name in enumerate(names)
        ]

    def host(name: str, *, suspect: bool, slow: int, confidence: float) -> dict[str, Any]:
        title = f"{name} was the slowest host in 4 of its last 5 runs, 6% each; runs without it were not slowed."
        return {
            "host": name,
            "suspect": suspect,
            "kind": "slow_host",
            "title": title if suspect else f"{name} was the slowest host as often as others.",
            "compared_runs": 41,
            "slow_runs": slow,
            "expected_slow_runs": 1.2,
            "last_runs": 5,
            "last_slow_runs": 4 if suspect else 0,
            "slow_share_without": 0.03,
            "slowdown_share": 0.062 if suspect else None,
            "slowdown_low_share": 0.055 if suspect else None,
            "slowdown_high_share": 0.071 if suspect else None,
            "phase": "forward" if suspect else None,
            "jobs": 7,
            "confidence": confidence,
            "p_value": 1e-30,
            "gpu_hours_lost": 812.3 if suspect else 0.0,
            "first_slow_wall_ns": BEGIN_NS,
            "last_slow_wall_ns": BEGIN_NS + 3 * WEEK_NS,
            "gpu_uuids": [],
            **behind,
        }

    total = 812_345.6
    return {
        "schema": 1,
        "kind": "fleet",
        "since_wall_ns": None,
        "first_wall_ns": BEGIN_NS,
        "last_wall_ns": BEGIN_NS + 46 * WEEK_NS,
        "generated_wall_ns": BEGIN_NS + 46 * WEEK_NS,
        "problems": ["runs/damaged/summary.json is damaged; the run is left out"],
        "totals": {
            "runs": 20_000,
            "active_runs": 3,
            "unread_runs": 2,
            "jobs": 40,
            "hosts": 200,
            "gpus": 1600,
            "users": 12,
            "gpu_hours": total,
            "useful_share": SHARES[0],
            "lost_gpu_hours": total * (1 - SHARES[0]),
            "headline": "29% of 812,346 GPU hours were not useful training; most of that: waiting for a slow rank.",
        },
        "causes": [
            {"cause": cause, "name": name, "gpu_hours": total * share, "share": share, **behind}
            for (cause, name), share in zip(CAUSES.items(), SHARES, strict=True)
        ],
        "over_time": {
            "unit": "week",
            "rows": [
                {"begin_wall_ns": BEGIN_NS + at * WEEK_NS, **hours(15_000.0 + 4000 * (at % 5), at)} for at in range(46)
            ],
        },
        "by_job": rows(*(f"python train_{at}.py · 64 ranks" for at in range(15))),
        "by_team": rows("team:vision", "team:speech", evil, "no tag"),
        "by_user": rows("anna", "ben"),
        "by_host": rows(*(f"gpu-{at:03}" for at in range(30))),
        "hosts": [
            host("gpu-017", suspect=True, slow=37, confidence=0.99999),
            host(evil, suspect=True, slow=9, confidence=0.9912),
            host("gpu-001", suspect=False, slow=2, confidence=0.31),
        ],
        "links": [
            {
                "hosts": ["gpu-012", "gpu-044"],
                "kind": "slow_link",
                "title": "Exchange is 2.1 times as long when gpu-012 and gpu-044 are in one run.",
                "compared_runs": 28,
                "slow_runs": 26,
                "expected_slow_runs": 0.9,
                "exchange_ratio": 2.1,
                "confidence": 0.9999,
                "p_value": 1e-20,
                "gpu_hours_lost": 401.0,
                "last_slow_wall_ns": BEGIN_NS,
                **behind,
            }
        ],
        "gpu_events": [
            {
                "host": "gpu-003",
                "gpu_uuid": "GPU-6a0e2c1f",
                "gpu_index": 3,
                "gpu_name": "NVIDIA H100 80GB HBM3",
                "kind": kind,
                "reasons": ["hw_thermal_slowdown"],
                "title": title,
                "throttled_share": share,
                "first_wall_ns": BEGIN_NS,
                "last_wall_ns": BEGIN_NS + WEEK_NS,
                **behind,
            }
            for kind, title, share in (
                ("throttled", "GPU 3 of gpu-003 was throttled in 14 runs (hw_thermal_slowdown).", 0.31),
                ("hardware_error", "Xid 79 in the failure of 2 runs on gpu-003.", None),
            )
        ],
        "changes": [
            {
                "wall_ns": BEGIN_NS + 17 * WEEK_NS - 86_400 * 10**9,
                "from_wall_ns": BEGIN_NS + 17 * WEEK_NS,
                "until_wall_ns": BEGIN_NS + 17 * WEEK_NS,
                "title": f"22 of 24 jobs are 3.1% {direction} since 2026-05-03: image pytorch:26.04 → pytorch:26.05.",
                "change_share": 0.031 * sign,
                "low_share": min(0.026 * sign, 0.036 * sign),
                "high_share": max(0.026 * sign, 0.036 * sign),
                "direction": direction,
                "jobs": 24,
                "changed_jobs": 22,
                "confidence": 0.9999,
                "phase": "input",
                "what": [{"name": "image", "before": "pytorch:26.04", "after": "pytorch:26.05", "jobs": 24}],
                "gpu_hours_lost": 1204.0 * sign,
                **behind,
            }
            for direction, sign in (("slower", 1), ("faster", -1))
        ],
    }
