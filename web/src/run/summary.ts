/**
 * What only the summary knows, asked for once however many panels want it. Of a run that goes on the hub has to make it
 * anew, so it is asked seldom.
 */

import { effect, signal, type Signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import type { SummaryDocument } from "../api/documents";
import { aborted } from "../api/source";
import type { OpenRun } from "./open-run";

const KEYS = "errors,attempts,notices,facts,facts_differ,exit_code,status,world_size,run,host";
const PAUSE_MS = 20_000;

interface Shared {
  answer: Signal<SummaryDocument | null>;
  users: number;
  stop: () => void;
}

const known = new WeakMap<OpenRun, Shared>();

/** Null until it is there. */
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
  let asked = "";
  const done = effect(() => {
    const about = run.about.value;
    void run.beat.value;
    // Another attempt, a death or the end is worth another question at once.
    const status = run.status.value;
    const state = JSON.stringify([status?.over, status?.attempt, status?.status]);
    const now = performance.now();
    if (about === null || (state === asked && (status?.over === true || now - askedMs < PAUSE_MS))) return;
    askedMs = now;
    asked = state;
    run.get<SummaryDocument>("summary", { keys: KEYS }, stop.signal).then(
      (found) => {
        answer.value = found;
      },
      (error: unknown) => {
        // It is asked again at the next beat after a pause; until then what was known stays.
        if (!aborted(error)) asked = "";
      },
    );
  });
  return () => {
    stop.abort();
    done();
  };
}
