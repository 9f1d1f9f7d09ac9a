/**
 * Marks in the browser's timeline when a step was drawn, so that benchmarks (bench/page.py) can measure the delay:
 * `performance.mark("stepscope:drawn", {detail: {step}})`. Only the last mark is kept.
 */

import { useEffect } from "preact/hooks";
import type { OpenRun } from "./open-run";

const DRAWN = "stepscope:drawn";

/** Renders nothing; placed last on the screen, after all charts. */
export function Drawn({ run }: { run: OpenRun }): null {
  const step = run.steps.value?.last.at(-1) ?? null;
  useEffect(() => {
    if (step === null) return;
    // Charts draw before the next frame; the frame after it starts once that one was presented.
    requestAnimationFrame(() =>
      requestAnimationFrame(() => {
        performance.clearMarks(DRAWN);
        performance.mark(DRAWN, { detail: { step } });
      }),
    );
  }, [step]);
  return null;
}
