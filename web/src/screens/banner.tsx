/** Below the bar while what is shown is not of now, or the end has come: why, how old it is, and what to do. */

import type { ComponentChildren } from "preact";
import type { OpenRun } from "../run/open-run";
import { useNow } from "../ui/now";
import { roughly } from "../ui/when";
import { SignInForm, WhereTheTokenIs } from "./sign-in";
import "./banner.css";

export function Banner({ run }: { run: OpenRun }) {
  switch (run.connection.value) {
    case "lost":
      return <Lost run={run} />;
    case "busy":
      return (
        <Strip tone="warning" title="Too many follow this hub already.">
          <p>
            What is shown is as it was <Heard run={run} />. It goes on by itself as soon as somebody else leaves. <Again run={run} />
          </p>
        </Strip>
      );
    case "refused":
      return (
        <Strip tone="warning" title="The session is over.">
          <p>
            What is shown is as it was <Heard run={run} />, and stays. Sign in to go on from here.
          </p>
          <SignInForm source={run.source} onDone={() => void run.open()} focus={false} />
          <details>
            <summary>Where the token is</summary>
            <WhereTheTokenIs />
          </details>
        </Strip>
      );
    case "gone":
      return (
        <Strip tone="critical" title="The run is no longer there.">
          <p>
            Its folder was moved, renamed or removed. What is shown stays until you leave this page. <Again run={run} /> <a href="#/">All runs</a>
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
    <Strip tone="warning" title="The hub does not answer.">
      <p>
        Last heard <Heard run={run} />; what is shown is as it was then. It goes on by itself as soon as the hub is back. <Again run={run} />
      </p>
    </Strip>
  );
}

function Ended({ run }: { run: OpenRun }) {
  const how = run.status.value?.status ?? "over";
  return (
    <Strip tone="info" title={how === "finished" ? "The run has finished." : `The run is over: ${how}.`}>
      <p>
        Its hub ended with it; what is shown stays. The whole of it is <code>report.html</code> in the run’s folder, and <code>stepscope serve</code> shows it like this again.
      </p>
    </Strip>
  );
}

/** The words are read once, not with every second that passes. */
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

function Heard({ run }: { run: OpenRun }) {
  useNow(1000);
  return <>{roughly(performance.now() - run.heardMs)} ago</>;
}

function Again({ run }: { run: OpenRun }) {
  return (
    <button type="button" class="quiet" onClick={() => void run.open()}>
      Try now
    </button>
  );
}
