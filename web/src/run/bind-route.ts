/** Synchronizes the address with the selected steps and rank, so that a link reproduces the view. */

import { batch, effect } from "@preact/signals";
import { go, route } from "../route";
import { count } from "../ui/format";
import { tell } from "../ui/toast";
import type { OpenRun } from "./open-run";

/** Active until the returned function is called. */
export function bindRoute(run: OpenRun): () => void {
  const fromAddress = effect(() => {
    const { screen, runs, first, last, step, rank } = route.value;
    if (screen !== "run" || runs[0] !== run.name) return; // another screen: this one is about to close
    batch(() => {
      const view = run.view.peek();
      if ((view?.first ?? null) !== first || (view?.last ?? null) !== last) {
        run.view.value = first !== null && last !== null && first <= last ? { first, last } : null;
      }
      run.step.value = step;
      run.rank.value = rank;
    });
  });
  const toAddress = effect(() => {
    const view = run.view.value;
    const next = { first: view?.first ?? null, last: view?.last ?? null, step: run.step.value, rank: run.rank.value };
    const now = route.peek();
    if (now.screen !== "run" || now.runs[0] !== run.name) return;
    if (Object.entries(next).some(([name, value]) => now[name as keyof typeof next] !== value)) go(next);
  });
  // A stale link may name ranks or steps that this run does not have.
  const possible = effect(() => {
    const about = run.about.value;
    if (about === null || about.world_size === 0) return;
    const absent: string[] = [];
    batch(() => {
      const [rank, step, view] = [run.rank.peek(), run.step.peek(), run.view.peek()];
      if (rank !== null && rank >= Math.max(about.world_size, about.ranks)) {
        absent.push(`rank ${rank}`);
        run.rank.value = null;
      }
      if (!about.over) return;
      if (step !== null && step > about.newest_step) {
        absent.push(`step ${count(step)}`);
        run.step.value = null;
      }
      if (view !== null && view.first > about.newest_step) {
        absent.push(`steps ${count(view.first)}–${count(view.last)}`);
        run.view.value = null;
      }
    });
    if (absent.length > 0) tell(`This run has no ${absent.join(" and no ")}.`);
  });
  return () => {
    fromAddress();
    toAddress();
    possible();
  };
}
