import { expect, test } from "vitest";
import { nothingText } from "../src/panels/verdict";
import { ranksWords, statusLook, statusText, stillIn, stillTitle } from "../src/words/standing";

const status = (more = {}) => ({ ranks: 8, live_ranks: 8, world_size: 8, over: false, ...more });

test("hung ranks are not shown as running", () => {
  const told = [{}, { live_ranks: 7 }, { still_ranks: 8 }, { still_ranks: 1 }, { live_ranks: 7, still_ranks: 7 }, { ranks: 1, live_ranks: 1, still_ranks: 1 }, { live_ranks: 0, still_ranks: 0 }, { ranks: 0 }, { ranks: 0, world_size: 0 }];
  expect(told.map((more) => ranksWords(status(more), true))).toEqual(["8 ranks", "7 of 8 ranks", "8 ranks hung", "1 of 8 ranks hung", "7 of 8 ranks hung", "1 rank hung", "all 8 ranks have ended", "8 ranks expected", "no rank yet"]);
  // For a copy or a silent hub, the current state is unknown.
  expect(ranksWords(status({ live_ranks: 7, still_ranks: 7 }), false)).toBe("8 ranks");
});

test("the step of an ongoing hang comes from its finding", () => {
  const hang = { kind: "hang_host", steps: [41, 41] as [number, number], evidence: { over: null } };
  const slow = { kind: "jitter", steps: [0, 40] as [number, number], evidence: {} };
  expect([stillIn([slow, hang]), stillIn([{ ...hang, evidence: { over: "ended" } }, slow]), stillIn([])]).toEqual([[41, 41], null, null]);
  expect([stillTitle(40), stillTitle(-1)]).toEqual(["Step 40 was the last to end; the figures cover completed steps.", "No step has ended yet."]);
});

test("the hub's words for how a run ended are shown as sent, without a tick beside a crash", () => {
  const runs = [
    { status: "finished", status_text: "finished", status_severity: "info" as const },
    { status: "crashed", status_text: "killed (SIGKILL)", status_severity: "critical" as const },
    { status: "finished", status_text: "exception, exit code 0", status_severity: "critical" as const },
    { status: "running", status_text: "hung", status_severity: "critical" as const },
    { status: "running", status_text: "running", status_severity: "info" as const },
    // A hub of an earlier version.
    { status: "finished" },
    { status: "crashed" },
    { status: "interrupted" },
  ];
  expect(runs.map((run) => [statusLook(run)[1], statusText(run)].join(" "))).toEqual(["✓ finished", "✖ killed (SIGKILL)", "✖ exception, exit code 0", "✖ hung", "● running", "✓ finished", "✖ crashed", "■ interrupted"]);
});

test("early in a run, the hub's sentence about missing steps stands in place of a verdict", () => {
  expect(nothingText("live", 4, 2, 2, "Collecting: 3 of 10 steps.")[0]).toBe("Collecting: 3 of 10 steps.");
  expect(nothingText("live", 40, 2, 2, "")[0]).toBe("Nothing wrong so far.");
});
