/** What all runs of this hub lost, to what, and on which host. The hub writes the document; every bar and row leads to its runs. */

import { useEffect, useState } from "preact/hooks";
import { LIST } from "../address";
import type { FleetDocument } from "../api/fleet-documents";
import { aborted, type Failure, type Source } from "../api/source";
import { FleetChanges, FleetHosts, FleetPairs, GpuEvents } from "../panels/fleet-tables";
import { HoursBy, HoursOverTime } from "../panels/fleet-hours";
import { fleetLink, go, route } from "../route";
import { asFailure } from "../run/open-run";
import { dayText } from "../run/fleet-bars";
import { Card } from "../ui/card";
import { count, hoursText, percent } from "../ui/format";
import { useShortcuts } from "../ui/shortcuts";
import { setTab } from "../ui/tab";
import { OutOfDate } from "./out-of-date";
import { PageTools } from "./page-tools";
import { ScreenBar } from "./screen-bar";
import { TroubleScreen } from "./trouble";
import "./fleet.css";

const AGAIN_MS = 60_000;
const PERIODS: [number, string][] = [[7, "last 7 days"], [30, "last 30 days"], [90, "last 90 days"], [365, "last 365 days"]];

export function FleetScreen({ source }: { source: Source }) {
  const days = route.value.days ?? null;
  const [found, setFound] = useState<FleetDocument | null>(null);
  const [failure, setFailure] = useState<Failure | null>(null);
  const [turn, setTurn] = useState(0);
  useShortcuts("Fleet", [{ keys: "g l", words: "go to the list of runs", act: () => go(LIST) }]);
  useEffect(() => {
    const stop = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const ask = async (): Promise<void> => {
      try {
        setFound(await source.get<FleetDocument>("fleet", days === null ? {} : { since_days: days }, stop.signal));
        setFailure(null);
      } catch (error) {
        if (aborted(error)) return;
        setFailure(asFailure(error));
      }
      timer = setTimeout(later, AGAIN_MS);
    };
    const later = (): void => void (document.hidden ? (timer = setTimeout(later, AGAIN_MS)) : ask());
    void ask();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [source, days, turn]);
  useEffect(() => setTab("Fleet", "none"), []);
  if (failure !== null && (found === null || failure.trouble === "refused")) {
    return <TroubleScreen failure={failure} source={source} what="Fleet" onAgain={() => setTurn(turn + 1)} />;
  }
  return (
    <>
      <ScreenBar home title="Fleet">
        <label class="fleet-period">
          <span class="hidden">Period</span>
          <select value={String(days ?? "")} onChange={(event) => void (location.hash = fleetLink(Number(event.currentTarget.value) || null))}>
            <option value="">all time</option>
            {days !== null && !PERIODS.some(([one]) => one === days) && <option value={String(days)}>last {days} days</option>}
            {PERIODS.map(([one, words]) => (
              <option key={one} value={String(one)}>
                {words}
              </option>
            ))}
          </select>
        </label>
        <span class="space" />
        <PageTools />
      </ScreenBar>
      <main id="main" class="grid fleet" tabIndex={-1} aria-busy={found === null}>
        {failure !== null && <OutOfDate />}
        {found === null ? <p class="nothing">Reading the runs …</p> : <Found found={found} />}
      </main>
    </>
  );
}

function Found({ found }: { found: FleetDocument }) {
  const { totals, causes } = found;
  if (totals.runs === 0) return <p class="nothing card">No runs in this period.</p>;
  return (
    <>
      <Totals found={found} />
      <HoursOverTime causes={causes} over={found.over_time} />
      <HoursBy
        causes={causes}
        tables={[
          ["job", found.by_job],
          ["team", found.by_team],
          ["user", found.by_user],
          ["host", found.by_host],
        ]}
      />
      <FleetHosts rows={found.hosts} />
      <FleetPairs rows={found.links} />
      <GpuEvents rows={found.gpu_events} />
      <FleetChanges rows={found.changes} />
      {found.problems.length > 0 && (
        <Card title="Not counted">
          <ul class="plain-list">
            {found.problems.map((text) => (
              <li key={text}>{text}</li>
            ))}
          </ul>
        </Card>
      )}
    </>
  );
}

function Totals({ found: { totals, first_wall_ns: first, last_wall_ns: last } }: { found: FleetDocument }) {
  const facts: [string, string][] = [
    ["GPU hours", hoursText(totals.gpu_hours)],
    ["lost", hoursText(totals.lost_gpu_hours)],
    ["useful", percent(totals.useful_share)],
    ["runs", count(totals.runs)],
    ["active", count(totals.active_runs)],
    ["jobs", count(totals.jobs)],
    ["hosts", count(totals.hosts)],
    ["GPUs", count(totals.gpus)],
    ["users", count(totals.users)],
  ];
  return (
    <Card title="All runs" about={first !== null && last !== null ? `started ${dayText(first)} – ${dayText(last)} (days in UTC)` : undefined} class="fleet-totals">
      <p class="fleet-headline">{totals.headline}</p>
      <dl class="fleet-facts">
        {facts.map(([name, text]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
      <p class="muted small">
        GPU hours are the hours of a run times its ranks; without GPUs they are rank-hours.
        {totals.unread_runs > 0 && ` ${count(totals.unread_runs)} ${totals.unread_runs === 1 ? "run has" : "runs have"} no summary and ${totals.unread_runs === 1 ? "is" : "are"} not in the hours.`}
      </p>
    </Card>
  );
}
