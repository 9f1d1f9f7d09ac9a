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
  expect(words({ standing: null })).toBe("In comm for 30.0 s, step 7.");
  expect(words({ standing: "waits in all_reduce" })).toBe("Waits in all_reduce, in comm for 30.0 s, step 7.");
  expect(words({ standing: "hung", live_phase: null })).toBe("Hung for 30.0 s, step 7.");
});
