/** What every chart over steps shares: it moves with the others, marks the chosen step, and sets the view of the run. */

import { stepRange, viewOf } from "../charts/columns";
import type { Span } from "../charts/span";
import { unlessAll } from "../charts/window";
import type { OpenRun, View } from "../run/open-run";

export interface StepAxis {
  together: string;
  range: Span | null;
  all: Span | null;
  chosen: number | null;
  onChoose: (step: number) => void;
  onStretch: (first: number, last: number) => void;
  onWhole: () => void;
}

export function stepAxis(run: OpenRun, whole: View | null): StepAxis {
  return {
    together: `${run.name}/steps`,
    range: stepRange(run.view.value ?? whole),
    all: stepRange(whole),
    chosen: run.step.value,
    onChoose: (step) => {
      run.step.value = Math.round(step);
    },
    onStretch: (first, last) => {
      if (whole !== null) run.view.value = unlessAll(viewOf(first, last, whole), whole);
    },
    onWhole: () => {
      run.view.value = null;
    },
  };
}
