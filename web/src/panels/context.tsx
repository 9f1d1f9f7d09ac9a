/** Context of the run: command, code, machines, environment and settings, and where ranks differ. */

import type { ComponentChildren } from "preact";
import { useSignal } from "@preact/signals";
import { isRecord } from "../api/copy-bytes";
import type { RankDocument, RanksDocument, RunContext, RunEvent } from "../api/documents";
import type { Row } from "../api/text-documents";
import { Bars } from "../charts/bars";
import { useAnswer, type OpenRun } from "../run/open-run";
import { useSummary } from "../run/summary";
import { Card, Nothing } from "../ui/card";
import { CopyButton } from "../ui/copy-button";
import { dateTime } from "../ui/format";
import { commandText, machineRows, meshText, peersText, settingRows, timeAccountOf, whoText } from "../words/context";
import { countOf } from "../words/ranks";
import { Pairs } from "./evidence";
import "./context.css";

const VARIABLES = 200;

export function ContextPanel({ run }: { run: OpenRun }) {
  const about = run.about.value;
  const summary = useSummary(run)?.summary;
  const lowest = useAnswer<RanksDocument>(run, "ranks", { limit: 1 }, 5000).value?.rank[0];
  const rank = useAnswer<RankDocument>(run, lowest === undefined ? null : `ranks/${lowest}`, { bins: 1 }, 60_000).value;
  if (about === null) return null;
  const { context } = about;
  // The run document is loaded once, possibly before its first rank; the status is updated.
  const worldSize = Math.max(about.world_size, run.status.value?.world_size ?? 0);
  const facts = rank?.facts ?? {};
  const sections = rank?.facts_text ?? [];
  const differ = Array.isArray(summary?.["facts_differ"]) ? summary["facts_differ"].map(String) : [];
  const settings = settingRows(summary?.["settings"]);
  const command = commandText(context.command);
  return (
    <Card title="Context" class="context" about="what ran, where and how">
      {command && (
        <div class="command">
          <pre tabIndex={0} aria-label="Command">
            {command}
          </pre>
          <CopyButton text={command} what="the command" />
        </div>
      )}
      <div class="context-parts">
        <Part title="Run">
          <Pairs left={0} rows={texts({ started: context.created_wall_ns === null ? "" : dateTime(context.created_wall_ns), ended: endOf(context), folder: context.cwd, "user and host": whoText(context), "recorded as": context.name === null || context.name === run.label.value ? "" : context.name, attempt: about.attempt > 0 ? `${about.attempt} (counted from 0)` : "" })} />
        </Part>
        <TimeAccount of={summary?.["time_account"]} />
        <Part title="Software">
          <Pairs left={0} rows={texts({ python: context.python, torch: rank?.identity["torch"], backend: rank?.identity["backend"], stepscope: context.stepscope, platform: context.platform, interpreter: context.executable })} />
        </Part>
        <Part title="Machines">
          <Pairs left={0} rows={[...texts({ ranks: worldSize > 0 ? countOf(worldSize, "rank") : "", device: rank?.identity["device_name"] || rank?.identity["device"] }), ...machineRows(summary?.["host"]), ...texts({ mesh: meshText(facts["mesh"]), [`rank ${lowest ?? 0} and those that do the same work`]: peersText(facts["peers"]) })]} />
        </Part>
        <Git git={context.git ?? gitOf(run.events.value)} />
        {settings.length > 0 && (
          <Part title="Settings">
            <Pairs left={0} rows={settings} />
          </Part>
        )}
      </div>
      {sections.length > 0 && (
        <details class="fold" open={settings.length === 0}>
          <summary>Everything recorded about the settings</summary>
          <div class="context-parts">
            {sections.map(({ title, rows }) => (
              <Part key={title} title={title}>
                <Pairs rows={rows} left={0} />
              </Part>
            ))}
          </div>
        </details>
      )}
      {differ.length > 0 && (
        <p class="differ">
          <span class="severity warning" aria-hidden="true">
            ▲{" "}
          </span>
          Ranks differ in {differ.slice(0, 20).map((name) => name.replaceAll(".", ": ").replaceAll("_", " ")).join("; ")}.
        </p>
      )}
      <Environment of={context.environment ?? {}} />
    </Card>
  );
}

function Part({ title, children }: { title: string; children: ComponentChildren }) {
  return (
    <div class="context-part">
      <h3>{title}</h3>
      {children}
    </div>
  );
}

/** Where the time of the whole run went; nothing for summaries of earlier versions. */
function TimeAccount({ of }: { of: unknown }) {
  const account = timeAccountOf(of);
  return account === null ? null : (
    <Part title="Time of the whole run">
      <Bars label="Time of the whole run" rows={account.rows} most={account.seconds} />
      <p class="muted small">{account.note}</p>
    </Part>
  );
}

function endOf({ end, end_text: text }: RunContext): string {
  return end === null ? "" : [text, dateTime(end.wall_ns)].filter(Boolean).join(", ");
}

function Git({ git }: { git: Record<string, unknown> | null }) {
  if (git === null) {
    return (
      <Part title="Code">
        <p class="muted">Not in a git repository.</p>
      </Part>
    );
  }
  const commit = String(git["commit"] ?? "");
  const changes = String(git["diff_stat"] ?? "");
  return (
    <Part title="Code">
      <Pairs left={0} rows={texts({ branch: git["branch"], state: git["dirty"] === true ? "uncommitted changes" : "clean" })} />
      {commit && (
        <p class="commit">
          <code>{commit}</code> <CopyButton text={commit} what="the commit" />
        </p>
      )}
      {changes && (
        <details class="fold">
          <summary>Changes</summary>
          <pre class="traceback" tabIndex={0}>
            {changes}
          </pre>
        </details>
      )}
    </Part>
  );
}

/** For an active run: the agent reports git in an event. */
function gitOf(events: readonly RunEvent[]): Record<string, unknown> | null {
  const found = events.find((event) => event.event === "context")?.["git"];
  return isRecord(found) ? found : null;
}

function Environment({ of }: { of: Record<string, string> }) {
  const search = useSignal("");
  const all = Object.entries(of).sort(([one], [two]) => (one < two ? -1 : 1));
  const wanted = search.value.toLowerCase();
  const found = all.filter(([name, value]) => `${name}=${value}`.toLowerCase().includes(wanted));
  return (
    <details class="fold environment">
      <summary>Environment, {countOf(all.length, "variable")}</summary>
      {all.length === 0 ? (
        <Nothing>No relevant variables were set.</Nothing>
      ) : (
        <>
          <label>
            Search <input type="search" value={search.value} onInput={(event) => (search.value = event.currentTarget.value)} />
          </label>
          <div class="scrolls" tabIndex={0} role="region" aria-label="Environment">
            <table>
              <thead>
                <tr>
                  <th scope="col">Variable</th>
                  <th scope="col">Value</th>
                </tr>
              </thead>
              <tbody>
                {found.slice(0, VARIABLES).map(([name, value]) => (
                  <tr key={name}>
                    <th scope="row">
                      <code>{name}</code>
                    </th>
                    <td>
                      <code>{value}</code>
                    </td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
          {found.length === 0 && <p class="muted">No matches.</p>}
        </>
      )}
    </details>
  );
}

/** Rows for the values that are known. */
function texts(of: Readonly<Record<string, unknown>>): Row[] {
  return Object.entries(of)
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => ({ key: name, name, value: { form: "text", text: String(value) } }));
}
