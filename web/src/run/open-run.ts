/**
 * The run that is looked at: what is known of it, kept up with its hub.
 *
 * Panels read the signals. What comes over the stream is put in at once; what has to be asked for (`ask` below) is asked
 * again when the run moved on, at most every few seconds. Nothing here grows with the length of the run.
 */

import { batch, computed, signal, useSignal, useSignalEffect } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";
import { encoded } from "../address";
import type { EventsDocument, FindingsDocument, RunDocument, RunEvent, Status, StepsDocument } from "../api/documents";
import { aborted, Failure, type Connection, type News, type Params, type Source } from "../api/source";
import { ownPhases } from "../charts/palette";
import { asFailure, Asker, type Answer } from "./asker";
import { BINS, corrected, devicePhases, joined } from "./steps";

export { asFailure, type Answer } from "./asker";

export interface View {
  first: number;
  last: number;
}

const MOST_EVENTS = 2000;
/** Of a run that is over a hub may still say that it ends with it. */
const LAST_WORD_MS = 2000;
/** For so long at most a hub that ends with its run still answers. */
const LAST_ANSWERS_MS = 6000;
const NOT_LOADED = "It was not asked for before the hub ended with its run; report.html in the run’s folder has it.";

export class OpenRun {
  readonly about = signal<RunDocument | null>(null);
  readonly status = signal<Status | null>(null);
  readonly findings = signal<FindingsDocument | null>(null);
  readonly events = signal<RunEvent[]>([]);
  /** The whole run in at most twice `BINS` bins; the newest steps one by one while it goes on. */
  readonly steps = signal<StepsDocument | null>(null);
  /** Whether devices are timed: times of the host are then called so. */
  readonly timed = computed(() => this.steps.value !== null && devicePhases(this.steps.value).length > 0);
  /** The steps that are looked at; null: all of them, and those that come. */
  readonly view = signal<View | null>(null);
  /** The steps of `view` as fine as they are known, a bin more at each side; the whole run while there is no view. */
  readonly seen = signal<StepsDocument | null>(null);
  readonly rank = signal<number | null>(null);
  readonly step = signal<number | null>(null);
  readonly connection = signal<Connection>("connecting");
  readonly trouble = signal<Failure | null>(null);
  /** When the hub was last heard, by `performance.now()`. */
  heardMs = performance.now();
  /** From when on nobody is there to be asked. */
  private emptyMs = Infinity;
  /** When it last brought steps; null: not since they were asked for. */
  movedMs: number | null = null;
  /** What the run's clock is ahead of `performance.now()`; null: the hub did not say what time it is there. */
  private aheadMs: number | null = null;
  /** Counts what came: whoever asks for more by itself asks again when it is another number. */
  readonly beat = signal(0);

  private stopFollowing: (() => void) | null = null;
  private leaving: ReturnType<typeof setTimeout> | null = null;
  private readonly closed = new AbortController();
  private loading: Promise<void> | null = null;
  /** Whether the answer that is under way is too old already. */
  private stale = false;
  /** What the stream told while everything was asked for anew: the answer may be older. */
  private meanwhile: News[] = [];

  constructor(
    readonly source: Source,
    readonly name: string,
  ) {}

  /** Load it and follow it, until `close`; again after a sign-in, or when somebody is tired of waiting. */
  async open(): Promise<void> {
    this.unfollow();
    this.emptyMs = Infinity;
    try {
      await this.load();
    } catch (error) {
      if (aborted(error)) return;
      // Once something is shown it stays: the stream tells when there is more.
      if (this.about.value === null) this.trouble.value = asFailure(error);
      else if (asFailure(error).trouble !== "refused") this.follow();
      return;
    }
    if (this.source.kind === "file") this.connection.value = "file";
    else if (this.status.value?.over) this.connected(this.status.value.leaving ? "ended" : "over");
    else this.follow();
  }

  /** Now, by the run's clock: neither the time of day here nor there may be set, or be wrong, and change it. */
  readonly now = (): number => (this.aheadMs === null ? Date.now() : performance.now() + this.aheadMs);

  close(): void {
    this.unfollow();
    this.closed.abort();
    if (this.leaving !== null) clearTimeout(this.leaving);
  }

  path(resource: string): string {
    return pathOf(this.name, resource);
  }

  async get<T>(resource: string, params: Params = {}, signal?: AbortSignal): Promise<T> {
    if (performance.now() > this.emptyMs) throw new Failure("unreachable", NOT_LOADED);
    try {
      const answer = await this.source.get<T>(this.path(resource), params, signal);
      this.heardMs = performance.now();
      return answer;
    } catch (error) {
      if (aborted(error)) throw error;
      const failure = asFailure(error);
      this.missed(failure);
      throw failure.trouble === "unreachable" && this.connection.value === "ended" ? new Failure("unreachable", NOT_LOADED) : error;
    }
  }

  private follow(): void {
    this.unfollow();
    this.stopFollowing = this.source.follow(this.name, {
      news: (news) => {
        this.heardMs = performance.now();
        this.take(news);
      },
      connection: (now) => this.connected(now),
    });
  }

  private connected(now: Connection): void {
    this.connection.value = now;
    if (now === "ended") this.emptyMs = performance.now() + LAST_ANSWERS_MS;
  }

  private unfollow(): void {
    this.stopFollowing?.();
    this.stopFollowing = null;
  }

  /** A question without an answer says how the connection is, where no stream is open that would. */
  private missed(failure: Failure): void {
    if (this.about.value === null || this.closed.signal.aborted) return;
    if (failure.trouble === "refused") this.connection.value = "refused";
    else if (failure.trouble === "unreachable" && this.connection.value === "over") {
      this.connection.value = "lost";
      this.follow();
    }
  }

  /** Everything anew; whoever asks while it is under way gets the same answer. */
  private load(): Promise<void> {
    this.loading ??= this.loadOnce().finally(() => {
      this.loading = null;
      this.meanwhile = [];
      if (this.stale) this.reload();
    });
    return this.loading;
  }

  private async loadOnce(): Promise<void> {
    const stop = this.closed.signal;
    // Whoever is not let in, or asks for a run that is not there, hears so once.
    const first = this.about.peek() === null ? await this.get<RunDocument>("", {}, stop) : null;
    const [about, steps, findings, events] = await Promise.all([
      first ?? this.get<RunDocument>("", {}, stop),
      this.get<StepsDocument>("steps", { bins: BINS }, stop),
      this.get<FindingsDocument>("findings", {}, stop),
      this.newestEvents(stop),
    ]);
    if (first !== null) ownPhases(about.phases ?? []);
    batch(() => {
      this.about.value = about;
      this.status.value = about;
      this.steps.value = steps;
      this.findings.value = findings;
      this.events.value = events;
      this.trouble.value = null;
      for (const news of this.meanwhile) this.put(news);
      this.beat.value += 1;
    });
  }

  /** The API begins with the oldest; of a long run only the last ones are kept here. */
  private async newestEvents(stop: AbortSignal): Promise<RunEvent[]> {
    const first = await this.get<EventsDocument>("events", { limit: MOST_EVENTS }, stop);
    if (!(first.total > MOST_EVENTS)) return first.events;
    const last = await this.get<EventsDocument>("events", { limit: MOST_EVENTS, after: first.total - MOST_EVENTS }, stop);
    return last.events;
  }

  private take(news: News): void {
    if (news.event === "steps") this.movedMs = performance.now();
    if (news.event === "heartbeat") this.aheadMs = news.data.wall_ns / 1e6 - performance.now();
    if (news.event === "reset") this.meanwhile = [];
    else if (this.loading !== null) this.meanwhile.push(news);
    batch(() => {
      this.put(news);
      this.beat.value += 1;
    });
    if (news.event === "reset") {
      // The first only says where the stream begins: what came between our question and it is missing here.
      const known = this.steps.value?.last.at(-1) ?? -1;
      if (news.data.why !== "first" || news.data.last_step > known) this.reload();
    } else if (news.event === "steps" && (this.steps.value?.first.length ?? 0) > 2 * BINS) {
      if (this.loading === null) this.reload();
    } else if (news.event === "status") {
      if (news.data.over && this.leaving === null) this.leave();
      // What is said of a run that has ended is another page than what was said while it went on.
      if (news.data.over && this.about.value?.over === false) this.reload();
    }
  }

  private put(news: News): void {
    if (news.event === "steps") this.steps.value = this.steps.value === null ? news.data : joined(this.steps.value, news.data);
    else if (news.event === "again") this.steps.value = this.steps.value && corrected(this.steps.value, news.data);
    else if (news.event === "events") this.events.value = newest(this.events.value, news.data.events);
    else if (news.event === "findings") this.findings.value = news.data;
    else if (news.event === "status") this.status.value = news.data;
  }

  /** Nothing more will come: no connection is held for it. */
  private leave(): void {
    this.leaving = setTimeout(() => {
      this.leaving = null;
      if (this.connection.value === "ended") return;
      this.unfollow();
      this.connection.value = "over";
    }, LAST_WORD_MS);
  }

  /** Not answered: what is shown stays. */
  private reload(): void {
    this.stale = this.loading !== null;
    if (!this.stale) this.load().catch(() => undefined);
  }
}

/** What is asked first about a run, as `OpenRun` asks for it. */
export function firstQuestions(name: string): [string, Params][] {
  return [
    [pathOf(name, ""), {}],
    [pathOf(name, "steps"), { bins: BINS }],
    [pathOf(name, "findings"), {}],
    [pathOf(name, "events"), { limit: MOST_EVENTS }],
  ];
}

function pathOf(name: string, resource: string): string {
  const run = `runs/${encoded(name)}`;
  return resource ? `${run}/${resource}` : run;
}

/**
 * Ask the run for a resource, and again when it moved on, at most every `everyMs`; `resource` null: do not ask.
 * A new question takes the place of the old one at once.
 */
export function useAnswer<T>(run: OpenRun, resource: string | null, params: Params = {}, everyMs = 2000): Answer<T> {
  return useAsked(run, JSON.stringify([resource, params]), everyMs, (stop) =>
    resource === null ? null : run.get<T>(resource, params, stop),
  );
}

/** The same for any question, e.g. `run.source.heat(…)`; `key` says which one it is. */
export function useAsked<T>(
  run: OpenRun,
  key: string,
  everyMs: number,
  question: (stop: AbortSignal) => Promise<T> | null,
): Answer<T> {
  const answer = useSignal<Answer<T>>({ value: null, failure: null });
  const asker = useMemo(() => new Asker(answer, everyMs), [run, key]);
  // A hub that ends with its run is asked once more for everything, then for nothing that is known already.
  asker.question = (stop) => {
    if (run.connection.peek() === "ended" && asker.askedLast && answer.peek().value !== null) return null;
    asker.askedLast = run.status.peek()?.over === true;
    return question(stop);
  };
  useEffect(() => () => asker.close(), [asker]);
  useSignalEffect(() => {
    void run.beat.value;
    // Nothing is asked about a run that may not be there.
    if (run.about.value === null) return;
    // A hub that ends with its run is there for a moment only.
    asker.due(run.status.value?.over === true);
  });
  useEffect(() => {
    if (run.about.peek() !== null) asker.due();
  }, [asker]);
  return answer.value;
}

function newest(known: RunEvent[], more: RunEvent[]): RunEvent[] {
  const last = known.at(-1)?.number ?? 0;
  const fresh = more.filter((event) => event.number > last);
  return fresh.length ? [...known, ...fresh].slice(-MOST_EVENTS) : known;
}
