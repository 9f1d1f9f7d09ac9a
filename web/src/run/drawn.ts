/**
 * Tells the browser's own timeline when a step came to the screen, so that benchmarks (bench/page.py) can say how long that
 * took: `performance.mark("stepscope:drawn", {detail: {step}})`. Only the last mark is kept.
 */

import { useEffect } from "preact/hooks";
import type { OpenRun } from "./open-run";

const DRAWN = "stepscope:drawn";

/** Draws nothing itself; stands last on the screen, so that all charts had their turn. */
export function Drawn({ run }: { run: OpenRun }): null {
  const step = run.steps.value?.last.at(-1) ?? null;
  useEffect(() => {
    if (step === null) return;
    // Charts draw before the next frame; the one after it begins when that frame was handed to the screen.
    requestAnimationFrame(() =>
      requestAnimationFrame(() => {
        performance.clearMarks(DRAWN);
        performance.mark(DRAWN, { detail: { step } });
      }),
    );
  }, [step]);
  return null;
}
