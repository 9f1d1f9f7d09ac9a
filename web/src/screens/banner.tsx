/** Shown below the bar if the data is out of date or the run has ended: why, how old the data is, and what to do. */

import type { ComponentChildren } from "preact";
import type { OpenRun } from "../run/open-run";
import { CopyButton } from "../ui/copy-button";
import { duration } from "../ui/format";
import { useNow } from "../ui/now";
import { SignInForm, WhereTheTokenIs } from "./sign-in";
import "./banner.css";

export function Banner({ run }: { run: OpenRun }) {
  switch (run.connection.value) {
    case "lost":
      return <Lost run={run} />;
    case "busy":
      return (
        <Strip tone="warning" title="Too many viewers are connected to this hub.">
          <p>
            Showing data from <Heard run={run} />. Updates resume when another viewer disconnects. <Again run={run} />
          </p>
        </Strip>
      );
    case "refused":
      return (
        <Strip tone="warning" title="Your session has expired.">
          <p>
            Showing data from <Heard run={run} />. Sign in to continue.
          </p>
          <SignInForm source={run.source} onDone={() => void run.open()} focus={false} />
          <details>
            <summary>Where to find the token</summary>
            <WhereTheTokenIs />
          </details>
        </Strip>
      );
    case "gone":
      return (
        <Strip tone="critical" title="The run is no longer available.">
          <p>
            Its folder was moved, renamed or removed. This page keeps its data until you leave it. <Again run={run} /> <a href="#/">All runs</a>
          </p>
        </Strip>
      );
    case "ended":
      return <Ended run={run} />;
    default:
      return null;
  }
}

function Lost({ run }: { run: OpenRun }) {
  return (
    <Strip tone="warning" title="The hub is not responding.">
      <p>
        Last update <Heard run={run} />. The page reconnects when the hub is back. <Again run={run} />
      </p>
      <Reopen run={run} when="If the run has ended, its hub has stopped. To open the run again:" />
    </Strip>
  );
}

function Ended({ run }: { run: OpenRun }) {
  const status = run.status.value;
  const how = status === null ? "over" : status.status_text;
  return (
    <Strip tone="info" title={how === "finished" ? "The run has finished." : `The run has ended: ${how}.`}>
      <p>
        Its hub has shut down. This page keeps its data until you reload or close it; <code>report.html</code> in the run’s folder has all of it.
      </p>
      <Reopen run={run} when="To open the run again:" />
    </Strip>
  );
}

/** Only the title is a live region, so that screen readers do not repeat the age every second. */
function Strip({ tone, title, children }: { tone: string; title: string; children: ComponentChildren }) {
  return (
    <section class={`banner ${tone}`} aria-label={title}>
      <h2>
        <span role="status">{title}</span>
      </h2>
      <div class="banner-body">{children}</div>
    </section>
  );
}

/** The command for a run whose hub ends with it: after a reload nothing is left to show it. */
function Reopen({ run, when }: { run: OpenRun; when: string }) {
  const command = run.about.value?.reopen;
  if (!command) return null;
  return (
    <p>
      {when} <code>{command}</code> <CopyButton text={command} what="the command" />
    </p>
  );
}

function Heard({ run }: { run: OpenRun }) {
  useNow(1000);
  return <>{duration((performance.now() - run.heardMs) * 1e6, true)} ago</>;
}

function Again({ run }: { run: OpenRun }) {
  return (
    <button type="button" class="quiet" onClick={() => void run.open()}>
      Try now
    </button>
  );
}
