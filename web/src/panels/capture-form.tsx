/** Requests a capture: which ranks, how many steps, what to record. */

import { useState } from "preact/hooks";
import { encoded } from "../address";
import { asFailure, type OpenRun } from "../run/open-run";
import { tell } from "../ui/toast";

const STEPS = 6;
const MOST_STEPS = 100;

type Choice = "worst" | "all" | "listed";

export function CaptureForm({ run, busy, onRequested }: { run: OpenRun; busy: boolean; onRequested: () => void }) {
  const [choose, setChoose] = useState<Choice>("worst");
  const [listed, setListed] = useState("");
  const [steps, setSteps] = useState(String(STEPS));
  const [memory, setMemory] = useState(false);
  const [shapes, setShapes] = useState(false);
  const [problem, setProblem] = useState("");
  const submit = async (event: Event): Promise<void> => {
    event.preventDefault();
    const ranks = ranksIn(listed);
    if (choose === "listed" && ranks === null) return setProblem("Enter ranks such as 0, 3 or 4-7.");
    setProblem("");
    try {
      await run.source.change("POST", `runs/${encoded(run.name)}/captures`, { choose, ...(choose === "listed" ? { ranks } : {}), steps: stepsIn(steps), memory, shapes });
      onRequested();
    } catch (error) {
      setProblem(asFailure(error).message);
      tell("The capture was not requested.");
    }
  };
  return (
    <form class="capture-form" aria-label="Capture now" onSubmit={(event) => void submit(event)}>
      <label>
        <span class="muted">Ranks</span>{" "}
        <select value={choose} onChange={(event) => setChoose(event.currentTarget.value as Choice)}>
          <option value="worst">worst and a median one</option>
          <option value="all">all</option>
          <option value="listed">listed</option>
        </select>
      </label>
      {choose === "listed" && <input aria-label="Ranks to capture" placeholder="0, 3, 4-7" size={12} value={listed} onInput={(event) => setListed(event.currentTarget.value)} />}
      <label>
        <span class="muted">Steps</span>{" "}
        <input type="number" min={1} max={MOST_STEPS} value={steps} onInput={(event) => setSteps(event.currentTarget.value)} />
      </label>
      <label>
        <input type="checkbox" checked={memory} onChange={(event) => setMemory(event.currentTarget.checked)} /> memory
      </label>
      <label>
        <input type="checkbox" checked={shapes} onChange={(event) => setShapes(event.currentTarget.checked)} /> shapes
      </label>
      <button type="submit" class="primary" disabled={busy}>
        {busy ? "Capturing …" : "Capture now"}
      </button>
      {problem !== "" && (
        <p class="capture-problem" role="alert">
          {problem}
        </p>
      )}
    </form>
  );
}

/** The number of steps in a field: within the limits, and the usual number if the field is empty. */
export function stepsIn(text: string): number {
  const steps = Math.round(Number(text));
  return text.trim() === "" || Number.isNaN(steps) ? STEPS : Math.min(MOST_STEPS, Math.max(1, steps));
}

/** The ranks of `0, 3, 4-7`; null: something else. */
export function ranksIn(text: string): number[] | null {
  const found = new Set<number>();
  for (const word of text.split(/[\s,]+/).filter(Boolean)) {
    const [, first = "", last = first] = /^(\d{1,6})(?:[-–](\d{1,6}))?$/.exec(word) ?? [];
    if (first === "" || Number(last) < Number(first) || Number(last) - Number(first) > 4096) return null;
    for (let rank = Number(first); rank <= Number(last); rank += 1) found.add(rank);
  }
  return found.size > 0 ? [...found].sort((one, two) => one - two) : null;
}
