/** The screen for the current address, and what all screens share. */

import type { ComponentChildren } from "preact";
import type { Route } from "./address";
import type { ReportDocument } from "./api/report-document";
import type { Source } from "./api/source";
import { route } from "./route";
import { CompareScreen } from "./screens/compare";
import { FleetScreen } from "./screens/fleet";
import { HelpDialog } from "./screens/help";
import { IncidentScreen } from "./screens/incident";
import { ReportScreen } from "./screens/report-screen";
import { RunList } from "./screens/run-list";
import { RunScreen } from "./screens/run-screen";
import { CaptureScreen } from "./screens/capture";
import { SweepScreen } from "./screens/sweep";
import { TraceScreen } from "./screens/trace";
import { Guard } from "./ui/guard";
import { Toast } from "./ui/toast";

export function App({ source }: { source: Source }) {
  return (
    <Shared>
      <Screen source={source} />
    </Shared>
  );
}

/** A file about traces, dumps, a comparison or a sweep has one screen. */
export function ReportApp({ report }: { report: ReportDocument }) {
  return (
    <Shared>
      <ReportScreen report={report} />
    </Shared>
  );
}

function Shared({ children }: { children: ComponentChildren }) {
  return (
    <>
      <Guard key={placeOf(route.value)}>{children}</Guard>
      <HelpDialog />
      <Toast />
    </>
  );
}

/** What was shown when an error occurred is left with Back or a link: another place starts without the error. */
function placeOf({ screen, runs, incident = null, capture = null }: Route): string {
  return [screen, ...runs, incident ?? "", capture ?? ""].join("\n");
}

function Screen({ source }: { source: Source }) {
  const { screen, runs, incident = null, capture = null } = route.value;
  const [one = ""] = runs;
  if (screen === "run") return <RunScreen key={one} source={source} name={one} />;
  if (screen === "incident" && incident !== null) return <IncidentScreen key={`${one}\n${incident}`} source={source} name={one} number={incident} />;
  if (screen === "compare") return <CompareScreen key={runs.join("\n")} source={source} runs={runs} />;
  if (screen === "capture" && capture !== null) return <CaptureScreen key={`${one}\n${capture}`} source={source} name={one} id={capture} />;
  if (screen === "trace") return <TraceScreen key={one} source={source} id={one} />;
  if (screen === "sweep") return <SweepScreen key={one} source={source} id={one} />;
  if (screen === "fleet") return <FleetScreen source={source} />;
  return <RunList source={source} />;
}
