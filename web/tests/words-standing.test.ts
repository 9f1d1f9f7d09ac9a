import { expect, test } from "vitest";
import { ranksWords, stillIn, stillTitle } from "../src/words/standing";

const status = (more = {}) => ({ ranks: 8, live_ranks: 8, world_size: 8, over: false, ...more });

test("ranks that stand still are not told as running", () => {
  const told = [{}, { live_ranks: 7 }, { still_ranks: 8 }, { still_ranks: 1 }, { live_ranks: 7, still_ranks: 7 }, { ranks: 1, live_ranks: 1, still_ranks: 1 }, { live_ranks: 0, still_ranks: 0 }, { ranks: 0 }, { ranks: 0, world_size: 0 }];
  expect(told.map((more) => ranksWords(status(more), true))).toEqual(["8 ranks", "7 of 8 ranks", "8 ranks stand still", "1 of 8 ranks stands still", "7 of 8 ranks stand still", "1 rank stands still", "all 8 ranks have ended", "8 ranks expected", "no rank yet"]);
  // Of a copy, or a hub that is silent, nobody knows what they do.
  expect(ranksWords(status({ live_ranks: 7, still_ranks: 7 }), false)).toBe("8 ranks");
});

test("the step that a job stands in is that of its finding, while it stands", () => {
  const hang = { kind: "hang_host", steps: [41, 41] as [number, number], evidence: { over: null } };
  const slow = { kind: "jitter", steps: [0, 40] as [number, number], evidence: {} };
  expect([stillIn([slow, hang]), stillIn([{ ...hang, evidence: { over: "ended" } }, slow]), stillIn([])]).toEqual([[41, 41], null, null]);
  expect([stillTitle(40), stillTitle(-1)]).toEqual(["Step 40 was the last that ended; figures are of steps that did.", "No step has ended yet."]);
});
