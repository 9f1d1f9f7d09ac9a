/** The bar above a run: name, status, progress, speed, and whether the data is current. */

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import type { Severity } from "../api/documents";
import { LIST } from "../address";
import { go } from "../route";
import { asFailure, type OpenRun } from "../run/open-run";
import { lastStepEndNs, newestStep, paceNow, stalledMs } from "../run/pace";
import { useSummary } from "../run/summary";
import { downloadBlob } from "../ui/csv";
import { count, digits, duration, stepsText } from "../ui/format";
import { Icon } from "../ui/icons";
import { useNow } from "../ui/now";
import { useShortcuts } from "../ui/shortcuts";
import { Chip, StatusChip } from "../ui/status-chip";
import { setTab, type Mark } from "../ui/tab";
import { theme } from "../ui/theme";
import { tell } from "../ui/toast";
import { gpuLoad } from "../words/context";
import { countOf } from "../words/ranks";
import { PageTools } from "./page-tools";
import { RankField } from "./rank-field";
import { ScreenBar } from "./screen-bar";
import { Sections } from "./sections";

const MARKS: Record<Severity, Mark> = { critical: "critical", warning: "warning", info: "good" };

export function RunBar({ run }: { run: OpenRun }) {
  useRunKeys(run);
  useTab(run);
  return (
    <ScreenBar home={run.source.kind === "hub"} title={run.label.value}>
      <span role="status">
        <Standing run={run} />
      </span>
      <Pace run={run} />
      <span class="space" />
      <RankField run={run} />
      <DownloadReport run={run} />
      <PageTools />
      <Sections />
    </ScreenBar>
  );
}

/** The status of the run; if the hub is silent, the status of the connection instead. */
function Standing({ run }: { run: OpenRun }) {
  const status = run.status.value;
  const connection = run.connection.value;
  if (connection === "file") {
    return (
      <>
        <StatusChip of={status ?? { status_text: "unfinished", status_severity: "warning" }} /> <Chip tone="" shape="▤" words="copy" />
      </>
    );
  }
  if (status === null) return <Chip tone="" shape="…" words="opening" />;
  if (status.over) return <StatusChip of={status} />;
  if (connection === "lost") return <Chip tone="warning" shape="▲" words="connection lost" />;
  if (connection === "busy") return <Chip tone="warning" shape="▲" words="not live" />;
  if (connection === "refused") return <Chip tone="critical" shape="✖" words="signed out" />;
  if (connection === "gone") return <Chip tone="critical" shape="✖" words="not available" />;
  if (status.ranks > 0 && status.live_ranks === 0) return <Chip tone="" shape="…" words="ending" />;
  return (
    <>
      <StatusChip of={status} />
      <span class="hidden">, {connection}</span>
    </>
  );
}

function Pace({ run }: { run: OpenRun }) {
  const status = run.status.value;
  const steps = run.steps.value;
  // For a copy, or an active run with a silent hub, only the progress reached so far is certain.
  const known = status?.over === true || ["live", "connecting", "over", "ended", "file"].includes(run.connection.value);
  const going = status !== null && !status.over && known && run.connection.value !== "file";
  const now = useNow(going ? 1000 : 0, run.now);
  if (status === null) return null;
  const step = newestStep(status, steps);
  const hung = going ? status.hung_steps : null;
  const context = run.about.value?.context;
  const began = context?.created_wall_ns ?? null;
  const end = status.ended_wall_ns ?? context?.end?.wall_ns ?? (going ? now * 1e6 : lastStepEndNs(steps));
  const quiet = run.movedMs === null ? null : performance.now() - run.movedMs;
  const stalled = going && status.live_ranks > 0 ? stalledMs(steps, quiet, now, began) : null;
  const pace = going && status.live_ranks > 0 && stalled === null ? paceNow(steps, quiet) : null;
  return (
    <ul class="bar-facts" aria-label="Progress">
      {hung === null ? <li>{step < 0 ? (status.over ? "no step" : "no step yet") : `step ${count(step)}`}</li> : <li title={hungTitle(step)}>in {stepsText(hung)}</li>}
      {step >= 0 && typeof status.logged_step === "number" && <li title="the number of this step in the framework's logs">logged as {count(status.logged_step + step - status.newest_step)}</li>}
      {/* For a copy or a silent hub, the current state of the ranks is unknown. */}
      <li class={going && status.hung_ranks > 0 ? "stalled" : undefined}>{going || status.over ? status.ranks_text : countOf(status.ranks, "rank")}</li>
      {stalled !== null && <li class="stalled">no step for {duration(stalled * 1e6, true)}</li>}
      {pace !== null && <li>{digits(pace)} steps/s</li>}
      <GpuLoad run={run} />
      {known && began !== null && end !== null && end > began && <li title="time since the start">{duration(end - began, going)}</li>}
      {status.attempt > 0 && <li title="The job was restarted; this is its latest attempt">attempt {status.attempt + 1}</li>}
    </ul>
  );
}

/** Explains why the figures end before the step of the hang. */
function hungTitle(whole: number): string {
  return whole < 0 ? "No step has ended yet." : `Step ${count(whole)} was the last to end; the figures cover completed steps.`;
}

/** How busy the GPUs are, from the summary: a glance says whether the job computes at all. */
function GpuLoad({ run }: { run: OpenRun }) {
  const load = gpuLoad(useSummary(run)?.summary["host"]);
  return load === null ? null : <li title={load.title}>{load.words}</li>;
}

/** The page of this run as one file, made by the hub: to keep, or to send to someone. */
function DownloadReport({ run }: { run: OpenRun }) {
  const busy = useSignal(false);
  const { source } = run;
  if (source.report === undefined || run.about.value === null) return null;
  const load = async (): Promise<void> => {
    busy.value = true;
    try {
      const report = await source.report?.(run.name);
      if (report !== undefined) downloadBlob(`${run.label.value}.html`, report);
    } catch (error) {
      tell(`The report was not made: ${asFailure(error).message}`);
    }
    busy.value = false;
  };
  return (
    <button type="button" class="report-button" title="Download this page as one file that needs no hub" disabled={busy.value} onClick={() => void load()}>
      <Icon name="download" />
      <span>{busy.value ? "Preparing …" : "Download report"}</span>
    </button>
  );
}

function useRunKeys(run: OpenRun): void {
  const most = Math.max(run.status.value?.ranks ?? 0, run.about.value?.world_size ?? 0);
  const turn = (by: number): void => {
    if (most > 0) run.rank.value = run.rank.value === null ? (by > 0 ? 0 : most - 1) : (run.rank.value + by + most) % most;
  };
  useShortcuts("This run", [
    { keys: "/", words: "find a rank", act: () => document.querySelector<HTMLElement>("[data-search]")?.focus() },
    { keys: "[", words: "previous rank", act: () => turn(-1) },
    { keys: "]", words: "next rank", act: () => turn(1) },
    { keys: "a", words: "show all steps, including new ones", act: () => void (run.view.value = null) },
    { keys: "Escape", words: "deselect the step, then the rank", act: () => void ((run.step.value === null ? run.rank : run.step).value = null) },
    ...(run.source.kind === "hub" ? [{ keys: "g l", words: "go to the list of runs", act: () => go(LIST) }] : []),
  ]);
}

/** Show name, progress and severity in the browser tab. */
function useTab(run: OpenRun): void {
  const status = run.status.value;
  const step = newestStep(status, run.steps.value);
  const severity = run.findings.value?.verdict?.severity;
  const broken = run.connection.value === "lost" || run.connection.value === "refused";
  const mark = severity !== undefined ? MARKS[severity] : broken ? "none" : status?.over === false ? "live" : "none";
  const hung = status?.hung_steps ?? null;
  const where = status === null ? "" : status.over ? ` · ${status.status_text}` : hung !== null ? ` · hung in ${stepsText(hung)}` : step < 0 ? "" : ` · step ${count(step)}`;
  const title = `${run.label.value}${where}`;
  const colors = theme.value;
  useEffect(() => setTab(title, mark), [title, mark, colors]);
}
