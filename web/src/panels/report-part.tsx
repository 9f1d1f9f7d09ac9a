/** A part of a report on files, by its form. */

import type { Part } from "../api/report-document";
import { Card } from "../ui/card";
import { FlightRecords } from "./flight";
import { FrontCard } from "./front";
import "./hang.css";
import { BarsCard, ColumnsCard, CurvesCard } from "./report-charts";
import { ReportFindingCard } from "./report-finding";
import { TablesCard } from "./report-table";
import { StacksView } from "./stacks";
import { TimelineCard } from "./timeline";

export function PartView({ part, file }: { part: Part; file: string }) {
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
