import { expect, test } from "vitest";
import type { RankDocument } from "../src/api/documents";
import { stateWords } from "../src/panels/rank-about";

const SECOND = 1e9;

function rank(now: Record<string, unknown>): RankDocument {
  return { now: { state: "running", live_phase: "comm", live_step: 7, live_since_wall_ns: 10 * SECOND, ...now } } as unknown as RankDocument;
}

test("a rank of a hung job is not shown as running", () => {
  const words = (now: Record<string, unknown>): string => stateWords(rank(now), 40 * SECOND);
  expect(words({})).toBe("In comm for 30.0 s, step 7.");
  expect(words({ hang_state: null })).toBe("In comm for 30.0 s, step 7.");
  expect(words({ hang_state: "waits in all_reduce" })).toBe("Waits in all_reduce, in comm for 30.0 s, step 7.");
  expect(words({ hang_state: "hung", live_phase: null })).toBe("Hung for 30.0 s, step 7.");
});

test("an ended rank is described in the hub's words", () => {
  const gone = { ...rank({ ended_wall_ns: 1e18, state: "vanished", last_step: 7 }), state_text: "vanished" };
  expect(stateWords(gone, 0)).toMatch(/^Vanished at .*, after step 7\.$/);
});
