/** The runs of a hub: search, sort, open, and select two for comparison. */

import { signal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";
import type { Source } from "../api/source";
import { compareLink, instead, route } from "../route";
import { chosenRows, statuses, toggled, type Column, type ListView } from "../run/list-rows";
import { RunFeed } from "../run/run-feed";
import { count } from "../ui/format";
import { useShortcuts } from "../ui/shortcuts";
import { setTab } from "../ui/tab";
import { theme } from "../ui/theme";
import { PageTools } from "./page-tools";
import { RunTable } from "./run-table";
import { ScreenBar } from "./screen-bar";
import { TroubleScreen } from "./trouble";
import "./run-list.css";

/** With more rows, redrawing at every keystroke of a search would be slow. */
const PER_PAGE = 50;
/** Kept while the page is open, so that the list is unchanged on return from a run. */
const view = signal<ListView>({ search: "", status: "", column: "created_wall_ns", down: true });
const page = signal(0);
const chosen = signal<string[]>([]);

export function RunList({ source }: { source: Source }) {
  const feed = useMemo(() => new RunFeed(source), [source]);
  useEffect(() => {
    feed.open();
    return () => feed.close();
  }, [feed]);
  const colours = theme.value;
  useEffect(() => setTab("Runs", "none"), [colours, feed.failure.value]);
  useShortcuts("List of runs", [{ keys: "/", words: "search", act: () => document.querySelector<HTMLElement>("[data-search]")?.focus() }]);
  const rows = feed.rows.value;
  const [only] = rows ?? [];
  // The hub's bare address opens its only run; the logo still leads to the list.
  useEffect(() => {
    if (rows?.length === 1 && only !== undefined && route.value.bare) instead({ screen: "run", runs: [only.id] });
  }, [rows?.length]);
  const failure = feed.failure.value;
  if (failure !== null && (rows === null || failure.trouble === "refused")) {
    return <TroubleScreen failure={failure} source={source} what="Runs" onAgain={() => void feed.ask()} />;
  }
  return (
    <>
      <ScreenBar home title="Runs">
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
        {rows !== null && (rows.length === 0 ? <NoRuns /> : <Found feed={feed} />)}
      </main>
    </>
  );
}

function Found({ feed }: { feed: RunFeed }) {
  const rows = feed.rows.value ?? [];
  const found = useMemo(() => chosenRows(rows, view.value), [rows, view.value]);
  const pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
  const at = Math.min(page.value, pages - 1);
  const change = (by: Partial<ListView>): void => {
    view.value = { ...view.value, ...by };
    page.value = 0;
  };
  const { search, status } = view.value;
  return (
    <>
      <div class="list-tools" role="search">
        <label class="list-search">
          <span class="hidden">Search runs by name, status or verdict</span>
          <input
            data-search
            type="search"
            placeholder="Search names and verdicts"
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
        <label class="narrow">
          <span class="muted">Sort</span>{" "}
          <select value={view.value.column} onChange={(event) => change(sortedBy(event.currentTarget.value as Column))}>
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
      {found.length === 0 ? (
        <p class="nothing card">No matching runs. {<button type="button" onClick={() => change({ search: "", status: "" })}>Show all</button>}</p>
      ) : (
        <RunTable
          rows={found.slice(at * PER_PAGE, (at + 1) * PER_PAGE)}
          view={view.value}
          onSort={(column) => change(view.value.column === column ? { down: !view.value.down } : sortedBy(column))}
          chosen={chosen.value}
          onChoose={(id) => void (chosen.value = toggled(chosen.value, id))}
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
  ["median_step_ms", "slowest step first"],
  ["steps", "most steps first"],
  ["ranks", "most ranks first"],
];

/** Default order: text ascending, numbers descending. */
function sortedBy(column: Column): Pick<ListView, "column" | "down"> {
  return { column, down: !["name", "status", "verdict"].includes(column) };
}

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

/** Stays visible while one or two runs are selected. */
function Chosen({ feed }: { feed: RunFeed }) {
  const [one, two] = chosen.value;
  if (one === undefined) return null;
  const name = (id: string): string => feed.rows.value?.find((row) => row.id === id)?.name ?? id;
  return (
    <div class="list-chosen" role="status">
      <span class="list-names">
        <bdi>{name(one)}</bdi> {two === undefined ? <span class="muted">selected: choose another run to compare</span> : <>and <bdi>{name(two)}</bdi></>}
      </span>
      {two !== undefined && (
        <a class="button primary" href={compareLink(one, two)}>
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

