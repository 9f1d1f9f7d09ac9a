"""The agent, as its launcher holds it: started again when it dies, heard when it wants the job ended or has sent all.

On the first node, or on the only one, it is over when the rings are drained.  On another it then sends what the hub
does not have yet, and we wait for that, not for ever: the user may stop us, and what was not sent stays.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepscope.agent.on_hang import HangPolicy
from stepscope.cli.ends import JobEnd
from stepscope.cli.helper import Helper, Mask, forget_signals
from stepscope.records.messages import say

__all__ = ["AgentChild", "HubLink", "host_of"]

AGENT_STARTS = 5
AGENT_END_S = 30.0
"""How long the agent may take for its last drain …"""
SEND_S = 60.0
"""… and, on another node than the first, to send the rest."""
SAY_AFTER_S = 1.0
"""If it takes longer than this, a line says what is going on."""
LAST_WISH_S = 3.0


@dataclass(frozen=True, kw_only=True)
class HubLink:
    """Where the hub of a job of several nodes is, and which of them this is; it stands in ``run.json``."""

    url: str
    run: str
    """The name that was asked for."""
    node: int
    nnodes: int

    @property
    def sends(self) -> bool:
        """Whether this node's part goes to another."""
        return self.node > 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class AgentChild:
    def __init__(self, run_dir: Path, session: Path, on_hang: HangPolicy, link: HubLink | None = None) -> None:
        words = ["stepscope.agent", "--run-dir", str(run_dir), "--session", str(session)]
        words += ["--hang-after", str(on_hang.after_s), f"--on-hang={on_hang.action}"]
        if link is not None:
            words += ["--hub", link.url, "--node", str(link.node), "--nnodes", str(link.nnodes)]
            words += [f"--run-name={link.run}"]
        self._link = link
        self._helper = Helper("agent", words, starts=AGENT_STARTS, without="steps stay in their rings until the end")
        self._gone = False
        self._wants_end = False
        self.delivered = False
        """Whether the hub has all of this node."""
        self.why_not = ""
        self.run_name = "" if link is None else link.run
        """What the run is called at the hub."""

    def start(self, mask: Mask) -> None:
        self._helper.start(mask)
        self._gone = not self._helper.running

    def keep_alive(self) -> None:
        if not self._gone and self._helper.over():
            self._gone = not self._helper.restart()
        self._hear()

    def wants_end(self) -> bool:
        """Whether it asked us to end the job."""
        return self._wants_end

    def finish(self, end: JobEnd, *, quiet: bool = False) -> None:
        """Tell it that the job is over and wait for its last drain, and for all to be sent where that is its task."""
        self.keep_alive()  # one that died this moment is started once more: it frees the rings that are left
        if not self._helper.running:
            return
        self._helper.tell({"end": end.to_dict()})
        began_s = time.monotonic()
        if self._link is not None and self._link.sends:
            self._let_send(self._link, began_s, quiet=quiet)
        elif not self._helper.wait(began_s + AGENT_END_S):
            say("the agent does not end; the summary may miss the last steps")
            self._helper.end()
        self._hear()
        self._gone = True

    def _let_send(self, link: HubLink, began_s: float, *, quiet: bool) -> None:
        if not self._helper.wait(began_s + SAY_AFTER_S):
            if not quiet:
                say(f"sending the rest to {host_of(link.url)} … (Ctrl-C: do not wait for it)")
            forget_signals()
            if not self._helper.wait(began_s + AGENT_END_S + SEND_S, patient=False):
                self._helper.end(LAST_WISH_S)

    def _hear(self) -> None:
        for word in self._helper.said():
            self._wants_end = self._wants_end or "abort" in word
            self.delivered = self.delivered or word.get("delivered") is True
            self.why_not = str(word.get("why", self.why_not))
            self.run_name = str(word.get("run") or self.run_name)


def host_of(url: str) -> str:
    return url.partition("//")[2]
