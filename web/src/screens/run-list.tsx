/** The runs of a hub: search, filter, sort, open, label and delete them, and select some for comparison. The view is in the address. */

import { signal } from "@preact/signals";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Source } from "../api/source";
import { compareLink, fleetLink, go, instead, route } from "../route";
import { chosenRows, NEWEST, readView, sortedBy, statuses, tagsOf, toggled, usersOf, writeView, type Column, type ListView } from "../run/list-rows";
import { RunFeed } from "../run/run-feed";
import { count } from "../ui/format";
import { useShortcuts } from "../ui/shortcuts";
import { setTab } from "../ui/tab";
import { theme } from "../ui/theme";
import { HistoryChart } from "./history-chart";
import { PageTools } from "./page-tools";
import { RunTable } from "./run-table";
import { ScreenBar } from "./screen-bar";
import { SweepList } from "./sweep-list";
import { TraceList } from "./trace-list";
import { TroubleScreen } from "./trouble";
import "./run-list.css";

/** With more rows, redrawing at every keystroke of a search would be slow. */
const PER_PAGE = 50;
/** Kept while the page is open, so that the list is unchanged on return from a run by a link that says nothing. */
let lastQuery = "";
const page = signal(0);
const chosen = signal<string[]>([]);

export function RunList({ source }: { source: Source }) {
  const feed = useMemo(() => new RunFeed(source), [source]);
  useEffect(() => {
    feed.open();
    return () => feed.close();
  }, [feed]);
  const colors = theme.value;
  useEffect(() => setTab("Runs", "none"), [colors, feed.failure.value]);
  useShortcuts("List of runs", [{ keys: "/", words: "search", act: () => document.querySelector<HTMLElement>("[data-search]")?.focus() }]);
  const query = route.value.query;
  const returned = useRef(true);
  useEffect(() => {
    if (returned.current && query === undefined && lastQuery !== "") go({ query: lastQuery });
    else lastQuery = query ?? "";
    returned.current = false;
  }, [query]);
  /** null: not known yet. */
  const [traces, setTraces] = useState<number | null>(null);
  const rows = feed.rows.value;
  const [only] = rows ?? [];
  // The hub's bare address opens its only run, unless there are traces besides; the logo still leads to the list.
  useEffect(() => {
    if (rows?.length === 1 && traces === 0 && only !== undefined && route.value.bare) instead({ screen: "run", runs: [only.id] });
  }, [rows?.length, traces]);
  const failure = feed.failure.value;
  if (failure !== null && (rows === null || failure.trouble === "refused")) {
    return <TroubleScreen failure={failure} source={source} what="Runs" onAgain={() => void feed.ask()} />;
  }
  return (
    <>
      <ScreenBar home title="Runs">
        {source.kind === "hub" && (rows?.length ?? 0) > 1 && <a href={fleetLink()}>Fleet</a>}
        <span class="space" />
        <PageTools />
      </ScreenBar>
      <main id="main" class="run-list" tabIndex={-1} aria-busy={rows === null}>
        {failure !== null && (
          <p class="banner warning" role="status">
            The list is out of date because the hub is not responding correctly. Retrying automatically.
          </p>
        )}
        {rows === null && <p class="nothing">Looking for runs …</p>}
        {rows !== null && <SweepList source={source} runs={rows.length} />}
        {rows !== null && <TraceList source={source} onCount={setTraces} />}
        {rows !== null && (rows.length === 0 ? traces === 0 && <NoRuns /> : <Found feed={feed} source={source} view={readView(query ?? "")} />)}
      </main>
    </>
  );
}

function Found({ feed, source, view }: { feed: RunFeed; source: Source; view: ListView }) {
  const rows = feed.rows.value ?? [];
  const query = writeView(view);
  const found = useMemo(() => chosenRows(rows, view), [rows, query]);
  const pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
  const at = Math.min(page.value, pages - 1);
  const change = (by: Partial<ListView>): void => {
    go({ query: writeView({ ...view, ...by }) });
    page.value = 0;
  };
  const { search, status, tag, user } = view;
  const tags = tagsOf(rows);
  const users = usersOf(rows, feed.me.value);
  return (
    <>
      <div class="list-tools" role="search">
        <label class="list-search">
          <span class="hidden">Search runs by name, status, verdict, tag, note, command, host, user or commit</span>
          <input
            data-search
            type="search"
            placeholder="Search runs"
            value={search}
            onInput={(event) => change({ search: event.currentTarget.value })}
            onKeyDown={(event) => event.key === "Escape" && event.currentTarget.blur()}
          />
        </label>
        <label>
          <span class="muted">Status</span>{" "}
          <select value={status} onChange={(event) => change({ status: event.currentTarget.value })}>
            <option value="">all</option>
            {statuses(rows).map(([word, many]) => (
              <option key={word} value={word}>
                {word} ({many})
              </option>
            ))}
          </select>
        </label>
        {(tags.length > 0 || tag !== "") && (
          <label>
            <span class="muted">Tag</span>{" "}
            <select value={tag} onChange={(event) => change({ tag: event.currentTarget.value })}>
              <option value="">all</option>
              {(tags.some(([word]) => word === tag) || tag === "" ? tags : [...tags, [tag, 0] as const]).map(([word, many]) => (
                <option key={word} value={word}>
                  {word} ({many})
                </option>
              ))}
            </select>
          </label>
        )}
        {(users.length > 1 || user !== "") && (
          <label>
            <span class="muted">User</span>{" "}
            <select value={user} onChange={(event) => change({ user: event.currentTarget.value })}>
              <option value="">all</option>
              {(users.some(([word]) => word === user) || user === "" ? users : [...users, [user, 0] as const]).map(([word, many]) => (
                <option key={word} value={word}>
                  {word === feed.me.value ? `me: ${word}` : word} ({many})
                </option>
              ))}
            </select>
          </label>
        )}
        <label class="narrow">
          <span class="muted">Sort</span>{" "}
          <select value={view.column} onChange={(event) => change(sortedBy(event.currentTarget.value as Column))}>
            {SORTS.map(([column, words]) => (
              <option key={column} value={column}>
                {words}
              </option>
            ))}
          </select>
        </label>
        <span class="muted" role="status">
          {found.length === rows.length ? many(rows.length) : `${count(found.length)} of ${many(rows.length)}`}
        </span>
      </div>
      {view.runs.length > 0 && (
        <p class="card list-behind">
          <span>
            {view.about === "" ? "Some runs" : <bdi>{view.about}</bdi>}{" "}
            <span class="muted">({found.length === view.runs.length ? many(found.length) : `${count(found.length)} of ${many(view.runs.length)} in this list`})</span>
          </span>
          <button type="button" onClick={() => change({ runs: [], about: "" })}>
            Show all runs
          </button>
        </p>
      )}
      <HistoryChart source={source} rows={found} tag={tag} />
      {found.length === 0 ? (
        <p class="nothing card">No matching runs. {<button type="button" onClick={() => change(NEWEST)}>Show all</button>}</p>
      ) : (
        <RunTable
          rows={found.slice(at * PER_PAGE, (at + 1) * PER_PAGE)}
          feed={feed}
          view={view}
          onSort={(column) => change(view.column === column ? { down: !view.down } : sortedBy(column))}
          onTag={(word) => change({ tag: word })}
          chosen={chosen.value}
          onChoose={(id) => void (chosen.value = toggled(chosen.value, id))}
          onGone={(id) => void (chosen.value = chosen.value.filter((one) => one !== id))}
        />
      )}
      {pages > 1 && <Pages at={at} pages={pages} />}
      <Chosen feed={feed} />
    </>
  );
}

const SORTS: [Column, string][] = [
  ["created_wall_ns", "newest first"],
  ["name", "by name"],
  ["status", "by status"],
  ["cost_share", "highest cost first"],
  ["median_step_ms", "slowest step first"],
  ["duration_s", "longest first"],
  ["steps", "most steps first"],
  ["ranks", "most ranks first"],
];

function many(runs: number): string {
  return runs === 1 ? "1 run" : `${count(runs)} runs`;
}

function Pages({ at, pages }: { at: number; pages: number }) {
  const turn = (to: number): void => {
    page.value = to;
    scrollTo({ top: 0 });
  };
  return (
    <nav class="list-pages" aria-label="Pages of the list">
      <button type="button" disabled={at === 0} onClick={() => turn(at - 1)}>
        Previous
      </button>
      <span class="muted">
        page {count(at + 1)} of {count(pages)}
      </span>
      <button type="button" disabled={at === pages - 1} onClick={() => turn(at + 1)}>
        Next
      </button>
    </nav>
  );
}

/** Stays visible while runs are selected. */
function Chosen({ feed }: { feed: RunFeed }) {
  const [one, ...others] = chosen.value;
  if (one === undefined) return null;
  const name = (id: string): string => feed.rows.value?.find((row) => row.id === id)?.name ?? id;
  return (
    <div class="list-chosen" role="status">
      <span class="list-names">
        <bdi>{name(one)}</bdi>{" "}
        {others.length === 0 ? (
          <span class="muted">selected: choose other runs to compare with it</span>
        ) : (
          <>
            <span class="muted">(baseline) and</span> {others.length <= 2 ? others.map((id, at) => <bdi key={id}>{`${at > 0 ? ", " : ""}${name(id)}`}</bdi>) : `${others.length} other runs`}
          </>
        )}
      </span>
      {others.length > 0 && (
        <a class="button primary" href={compareLink(chosen.value)}>
          Compare
        </a>
      )}
      <button type="button" onClick={() => void (chosen.value = [])}>
        Clear
      </button>
    </div>
  );
}

function NoRuns() {
  return (
    <section class="card no-runs" aria-labelledby="no-runs">
      <h2 id="no-runs">No runs yet</h2>
      <p>Start your training with this command, and the run appears here:</p>
      <pre>stepscope run train.py</pre>
      <p class="muted">
        For an example, run <code>stepscope demo</code>. This list updates automatically.
      </p>
    </section>
  );
}

