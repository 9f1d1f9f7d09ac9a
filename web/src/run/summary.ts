/**
 * The run's summary, requested once for all panels. For an active run the hub must compute it each time, so it is requested
 * rarely.
 */

import { effect, signal, type Signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import type { SummaryDocument } from "../api/documents";
import { aborted } from "../api/source";
import type { OpenRun } from "./open-run";

const KEYS = "errors,attempts,notices,facts_differ,settings,exit_code,status,world_size,run,host,time_account,goodput,advice_after_failure";
const PAUSE_MS = 20_000;

interface Shared {
  answer: Signal<SummaryDocument | null>;
  users: number;
  stop: () => void;
}

const known = new WeakMap<OpenRun, Shared>();

/** Null until loaded. */
export function useSummary(run: OpenRun): SummaryDocument | null {
  let shared = known.get(run);
  if (shared === undefined) known.set(run, (shared = { answer: signal(null), users: 0, stop: () => undefined }));
  const held = shared;
  useEffect(() => {
    held.users += 1;
    if (held.users === 1) held.stop = keep(run, held.answer);
    return () => {
      held.users -= 1;
      if (held.users === 0) held.stop();
    };
  }, [held]);
  return held.answer.value;
}

function keep(run: OpenRun, answer: Signal<SummaryDocument | null>): () => void {
  const stop = new AbortController();
  let askedMs = -Infinity;
  let requested = "";
  const done = effect(() => {
    const about = run.about.value;
    void run.beat.value;
    // Request again at once after a new attempt, a death or the end.
    const status = run.status.value;
    const state = JSON.stringify([status?.over, status?.attempt, status?.status]);
    const now = performance.now();
    if (about === null || (state === requested && (status?.over === true || now - askedMs < PAUSE_MS))) return;
    askedMs = now;
    requested = state;
    run.get<SummaryDocument>("summary", { keys: KEYS }, stop.signal).then(
      (found) => {
        answer.value = found;
      },
      (error: unknown) => {
        // Requested again at the next beat after a pause; until then the old answer stays.
        if (!aborted(error)) requested = "";
      },
    );
  });
  return () => {
    stop.abort();
    done();
  };
}
