/**
 * The open run: its data, kept up to date with the hub.
 *
 * Panels read the signals. News from the stream is applied at once; other resources (`useAnswer` below) are requested again
 * when the run progresses, at most every few seconds. Nothing here grows with the length of the run.
 */

import { batch, computed, signal, useSignal, useSignalEffect } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";
import { encoded } from "../address";
import type { EventsDocument, FindingsDocument, RunDocument, RunEvent, Status, StepsDocument } from "../api/documents";
import { aborted, Failure, type Connection, type News, type Params, type Source } from "../api/source";
import { ownPhases } from "../charts/palette";
import { asFailure, RepeatedRequest, type Answer } from "./repeated-request";
import { BINS, corrected, devicePhases, joined } from "./steps";

export { asFailure, type Answer } from "./repeated-request";

export interface View {
  first: number;
  last: number;
}

const MOST_EVENTS = 2000;
/** After the end of a run, how long to wait for a hub's announcement that it shuts down too. */
const LAST_WORD_MS = 2000;
/** How long a hub that shuts down with its run still responds, at most. */
const LAST_ANSWERS_MS = 6000;
const NOT_LOADED = "Not loaded before the hub shut down. See report.html in the run’s folder.";

export class OpenRun {
  readonly about = signal<RunDocument | null>(null);
  /** The name to show; in a hub of several folders `name` also contains a tag. */
  readonly label = computed(() => this.about.value?.label ?? this.about.value?.id ?? this.name);
  readonly status = signal<Status | null>(null);
  readonly findings = signal<FindingsDocument | null>(null);
  readonly events = signal<RunEvent[]>([]);
  /** The whole run in at most twice `BINS` bins; the newest steps individually while it is active. */
  readonly steps = signal<StepsDocument | null>(null);
  /** Whether devices are timed; host times are then labeled as such. */
  readonly timed = computed(() => this.steps.value !== null && devicePhases(this.steps.value).length > 0);
  /** Whether the findings use the devices' clock: the charts then start with it, too. */
  readonly onDevice = computed(() => this.timed.value && (this.status.value?.clock ?? "host") === "device");
  /** The visible steps; null: all, including new ones. */
  readonly view = signal<View | null>(null);
  /** The steps of `view` in the finest known resolution, plus a bin at each side; the whole run if there is no view. */
  readonly seen = signal<StepsDocument | null>(null);
  readonly rank = signal<number | null>(null);
  readonly step = signal<number | null>(null);
  readonly connection = signal<Connection>("connecting");
  readonly trouble = signal<Failure | null>(null);
  /** Time of the hub's last response, by `performance.now()`. */
  heardMs = performance.now();
  /** When the hub will no longer respond. */
  private emptyMs = Infinity;
  /** When steps last arrived by stream; null: none since loading. */
  movedMs: number | null = null;
  /** Offset of the run's clock from `performance.now()`; null: unknown. */
  private aheadMs: number | null = null;
  /** Increases with each update, which triggers repeated requests. */
  readonly beat = signal(0);

  private stopFollowing: (() => void) | null = null;
  private leaving: ReturnType<typeof setTimeout> | null = null;
  private readonly closed = new AbortController();
  private loading: Promise<void> | null = null;
  /** Whether the pending load is already outdated. */
  private stale = false;
  /** News received during a load, whose answer may be older. */
  private meanwhile: News[] = [];

  constructor(
    readonly source: Source,
    readonly name: string,
  ) {}

  /** Load and follow the run until `close`; called again after sign-in or by "Try now". */
  async open(): Promise<void> {
    this.unfollow();
    this.emptyMs = Infinity;
    try {
      await this.load();
    } catch (error) {
      if (aborted(error)) return;
      // Keep what is shown; the stream reports when there is more.
      if (this.about.value === null) this.trouble.value = asFailure(error);
      else if (asFailure(error).trouble !== "refused") this.follow();
      return;
    }
    if (this.source.kind === "file") this.connection.value = "file";
    else if (this.status.value?.over) this.connected(this.status.value.leaving ? "ended" : "over");
    else this.follow();
  }

  /** Current time by the run's clock; unaffected by changes of either wall clock. */
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

  /** A failed request updates the connection state if no stream is open to do so. */
  private missed(failure: Failure): void {
    if (this.about.value === null || this.closed.signal.aborted) return;
    if (failure.trouble === "refused") this.connection.value = "refused";
    else if (failure.trouble === "unreachable" && this.connection.value === "over") {
      this.connection.value = "lost";
      this.follow();
    }
  }

  /** Load everything; concurrent calls share one load. */
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
    // First one request, so that a refusal or a missing run is reported once.
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

  /** The API returns the oldest events first; only the last `MOST_EVENTS` are kept. */
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
      // The first reset only says where the stream starts; steps between our load and that point are missing.
      const known = this.steps.value?.last.at(-1) ?? -1;
      if (news.data.why !== "first" || news.data.last_step > known) this.reload();
    } else if (news.event === "steps" && (this.steps.value?.first.length ?? 0) > 2 * BINS) {
      if (this.loading === null) this.reload();
    } else if (news.event === "status") {
      if (news.data.over && this.leaving === null) this.leave();
      // The documents of an ended run differ from those of an active one.
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

  /** Close the stream: nothing more will arrive. */
  private leave(): void {
    this.leaving = setTimeout(() => {
      this.leaving = null;
      if (this.connection.value === "ended") return;
      this.unfollow();
      this.connection.value = "over";
    }, LAST_WORD_MS);
  }

  /** Load again; on failure keep what is shown. */
  private reload(): void {
    this.stale = this.loading !== null;
    if (!this.stale) this.load().catch(() => undefined);
  }
}

/** The first requests of `OpenRun`. */
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
 * Request a resource of the run, and again when the run progresses, at most every `everyMs`; `resource` null: no request.
 * A new request replaces the old one at once.
 */
export function useAnswer<T>(run: OpenRun, resource: string | null, params: Params = {}, everyMs = 2000): Answer<T> {
  return useAsked(run, JSON.stringify([resource, params]), everyMs, (stop) =>
    resource === null ? null : run.get<T>(resource, params, stop),
  );
}

/** The same for any request, such as `run.source.heat(…)`, identified by `key`. */
export function useAsked<T>(
  run: OpenRun,
  key: string,
  everyMs: number,
  question: (stop: AbortSignal) => Promise<T> | null,
): Answer<T> {
  const answer = useSignal<Answer<T>>({ value: null, failure: null });
  const repeated = useMemo(() => new RepeatedRequest(answer, everyMs), [run, key]);
  // When a hub shuts down with its run, everything is requested once more, then nothing that is already known.
  repeated.question = (stop) => {
    if (run.connection.peek() === "ended" && repeated.finalRequested && answer.peek().value !== null) return null;
    repeated.finalRequested = run.status.peek()?.over === true;
    return question(stop);
  };
  useEffect(() => () => repeated.close(), [repeated]);
  useSignalEffect(() => {
    void run.beat.value;
    // Make no requests for a run that may not exist.
    if (run.about.value === null) return;
    // The hub may shut down soon after the run.
    repeated.due(run.status.value?.over === true);
  });
  useEffect(() => {
    if (run.about.peek() !== null) repeated.due();
  }, [repeated]);
  return answer.value;
}

function newest(known: RunEvent[], more: RunEvent[]): RunEvent[] {
  const last = known.at(-1)?.number ?? 0;
  const fresh = more.filter((event) => event.number > last);
  return fresh.length ? [...known, ...fresh].slice(-MOST_EVENTS) : known;
}
