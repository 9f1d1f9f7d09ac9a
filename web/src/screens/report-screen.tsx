/** The screen of a report on traces, Flight Recorder dumps, a comparison or a sweep: the verdict, then its parts in the order of the document. */

import { useEffect, useMemo, useState } from "preact/hooks";
import type { ComponentChildren } from "preact";
import type { ReportDocument } from "../api/report-document";
import type { Look } from "../api/text-documents";
import { EmbeddedTrace, type TraceData } from "../api/trace-data";
import { ReportFindingCard } from "../panels/report-finding";
import { PartView } from "../panels/report-part";
import { RankSwitch, TraceViews, ViewTabs } from "../panels/trace-views";
import { NO_PLACE, placeIn, type TracePlace } from "../run/trace-place";
import { Chip } from "../ui/status-chip";
import { setTab, type Mark } from "../ui/tab";
import { theme } from "../ui/theme";
import { PageTools } from "./page-tools";
import { ScreenBar } from "./screen-bar";
import { Sections } from "./sections";

const MARKS: Record<Look, Mark> = { critical: "critical", warning: "warning", info: "good", healthy: "good" };
const KINDS = { trace: "trace", flight: "Flight Recorder", compare: "comparison", sweep: "sweep" };

interface ReportProps {
  report: ReportDocument;
  /** Whether it is a screen of a hub, with a list of runs and an address; else a file. */
  home?: boolean;
  /** Of traces of a hub. */
  traces?: { data: TraceData; place: TracePlace; onPlace: (place: TracePlace) => void; title: string; bar?: ComponentChildren; lead?: ComponentChildren };
}

export function ReportScreen({ report, home = false, traces }: ReportProps) {
  const colors = theme.value;
  const [own, setOwn] = useState<TracePlace>(NO_PLACE);
  const embedded = useMemo(() => new EmbeddedTrace(report), [report]);
  const title = traces?.title ?? report.name;
  useEffect(() => setTab(title, MARKS[report.verdict.look] ?? "none"), [report, title, colors]);
  const place = placeIn(report, traces?.place ?? own);
  const onPlace = traces?.onPlace ?? setOwn;
  const data = traces?.data ?? embedded;
  return (
    <>
      <ScreenBar home={home} title={title}>
        {traces?.bar}
        <Chip tone="" shape="▤" words={KINDS[report.kind] ?? "report"} />
        <ul class="bar-facts report-facts" aria-label="About the files">
          {report.facts.map((fact) => (
            <li key={fact}>{fact}</li>
          ))}
        </ul>
        <span class="space" />
        {report.views && <RankSwitch ranks={data.ranks} place={place} onPlace={onPlace} />}
        <PageTools link={home} />
        {report.views ? <ViewTabs views={report.views} place={place} onPlace={onPlace} /> : <Sections />}
      </ScreenBar>
      <main id="main" class="grid" tabIndex={-1} aria-busy={false}>
        {report.notices.map((notice) => (
          <p key={notice} class="report-notice" role="note">
            {notice}
          </p>
        ))}
        {report.views ? (
          <TraceViews report={report} data={data} place={place} onPlace={onPlace} lead={traces?.lead} />
        ) : (
          <>
            <ReportFindingCard label="Verdict" finding={report} />
            {report.parts.map((part, at) => (
              <PartView key={at} part={part} file={report.name} />
            ))}
          </>
        )}
      </main>
    </>
  );
}
