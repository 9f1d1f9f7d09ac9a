/** The screen of a report on traces, Flight Recorder dumps, a comparison or a sweep: the verdict, then its parts in the order of the document. */

import { useEffect } from "preact/hooks";
import type { Part, ReportDocument } from "../api/report-document";
import { FlightRecords } from "../panels/flight";
import { FrontCard } from "../panels/front";
import "../panels/hang.css";
import { BarsCard, ColumnsCard, CurvesCard } from "../panels/report-charts";
import { TablesCard } from "../panels/report-table";
import { StacksView } from "../panels/stacks";
import { TimelineCard } from "../panels/timeline";
import { ReportFindingCard } from "../panels/report-finding";
import { Card } from "../ui/card";
import type { Look } from "../api/text-documents";
import { Chip } from "../ui/status-chip";
import { setTab, type Mark } from "../ui/tab";
import { theme } from "../ui/theme";
import { PageTools } from "./page-tools";
import { ScreenBar } from "./screen-bar";
import { Sections } from "./sections";

const MARKS: Record<Look, Mark> = { critical: "critical", warning: "warning", info: "good", healthy: "good" };
const KINDS = { trace: "trace", flight: "Flight Recorder", compare: "comparison", sweep: "sweep" };

/** `home`: whether it is a screen of a hub, with a list of runs and an address; else a file. */
export function ReportScreen({ report, home = false }: { report: ReportDocument; home?: boolean }) {
  const colors = theme.value;
  useEffect(() => setTab(report.name, MARKS[report.verdict.look] ?? "none"), [report, colors]);
  return (
    <>
      <ScreenBar home={home} title={report.name}>
        <Chip tone="" shape="▤" words={KINDS[report.kind] ?? "report"} />
        <ul class="bar-facts report-facts" aria-label="About the files">
          {report.facts.map((fact) => (
            <li key={fact}>{fact}</li>
          ))}
        </ul>
        <PageTools link={home} />
        <Sections />
      </ScreenBar>
      <main id="main" class="grid" tabIndex={-1} aria-busy={false}>
        {report.notices.map((notice) => (
          <p key={notice} class="report-notice" role="note">
            {notice}
          </p>
        ))}
        <ReportFindingCard label="Verdict" finding={report} />
        {report.parts.map((part, at) => (
          <PartView key={at} part={part} file={report.name} />
        ))}
      </main>
    </>
  );
}

function PartView({ part, file }: { part: Part; file: string }) {
  switch (part.form) {
    case "tables":
      return <TablesCard {...part} file={file} />;
    case "timeline":
      return <TimelineCard timeline={part} />;
    case "bars":
      return <BarsCard bars={part} />;
    case "columns":
      return <ColumnsCard columns={part} />;
    case "curves":
      return <CurvesCard curves={part} />;
    case "front":
      return <FrontCard front={part} />;
    case "finding":
      return <ReportFindingCard label={part.title} finding={part} />;
    case "flight":
      return (
        <Card title={part.title}>
          <div class="flight">
            <FlightRecords flight={part.flight} report />
          </div>
        </Card>
      );
    case "stacks":
      return (
        <Card title={part.title} about="equal ones grouped">
          <StacksView stacks={part.stacks} headed={false} />
        </Card>
      );
    case "list":
      return (
        <Card title={part.title}>
          <ul class="plain-list">
            {part.items.map((item, at) => (
              <li key={at}>{item}</li>
            ))}
          </ul>
          {part.more !== "" && <p class="muted">{part.more}</p>}
        </Card>
      );
  }
}
