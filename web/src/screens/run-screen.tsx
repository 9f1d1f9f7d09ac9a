/** The screen of a run: its verdict, then all data behind it. */

import { useEffect, useMemo } from "preact/hooks";
import type { Source } from "../api/source";
import { CapturesPanel } from "../panels/captures";
import { CollectivesPanel } from "../panels/collectives";
import { ContextPanel } from "../panels/context";
import { CopyNotice } from "../panels/copy-notice";
import { EventsPanel } from "../panels/events";
import { FindingHistoryPanel } from "../panels/finding-history";
import { GoodputPanel } from "../panels/goodput";
import { HangPanel } from "../panels/hang";
import { IncidentsPanel } from "../panels/incidents";
import { HeatMap } from "../panels/heat-map";
import { LayersPanel } from "../panels/layers";
import { LogsPanel } from "../panels/logs";
import { Machine } from "../panels/machine";
import { Memory } from "../panels/memory";
import { MetricsPanel } from "../panels/metrics";
import { NodesPanel } from "../panels/nodes";
import { RankPanel } from "../panels/rank";
import { StepTime } from "../panels/step-time";
import { VerdictPanel } from "../panels/verdict";
import { WorstMedian } from "../panels/worst-median";
import { bindRoute } from "../run/bind-route";
import { Drawn } from "../run/drawn";
import { OpenRun } from "../run/open-run";
import { Banner } from "./banner";
import { EmptyRun } from "./empty-run";
import { RunBar } from "./run-bar";
import { TroubleScreen } from "./trouble";

export function RunScreen({ source, name }: { source: Source; name: string }) {
  const run = useMemo(() => new OpenRun(source, name), [source, name]);
  useEffect(() => {
    const unbind = bindRoute(run);
    void run.open();
    return () => {
      unbind();
      run.close();
    };
  }, [run]);
  const trouble = run.trouble.value;
  if (trouble !== null) return <TroubleScreen failure={trouble} source={source} what={name} onAgain={() => void run.open()} />;
  const empty = run.steps.value?.first.length === 0;
  return (
    <>
      <RunBar run={run} />
      <main id="main" class="grid" tabIndex={-1} aria-busy={run.about.value === null}>
        <Banner run={run} />
        <VerdictPanel run={run} />
        <HangPanel run={run} />
        <IncidentsPanel run={run} />
        <CapturesPanel run={run} />
        {empty ? <EmptyRun run={run} /> : <Figures run={run} />}
        <GoodputPanel run={run} />
        <FindingHistoryPanel run={run} />
        <EventsPanel run={run} />
        <NodesPanel run={run} />
        <ContextPanel run={run} />
        <CopyNotice run={run} />
      </main>
      <Drawn run={run} />
    </>
  );
}

/** Panels that need at least one step. */
function Figures({ run }: { run: OpenRun }) {
  return (
    <>
      <StepTime run={run} />
      <MetricsPanel run={run} />
      <HeatMap run={run} />
      <RankPanel run={run} />
      <LogsPanel run={run} />
      <WorstMedian run={run} />
      <Memory run={run} />
      <Machine run={run} />
      <CollectivesPanel run={run} />
      <LayersPanel run={run} />
    </>
  );
}
