/** Shown in place of a screen that cannot be displayed: what happened, and what to do. */

import { useEffect, useState } from "preact/hooks";
import type { ComponentChildren } from "preact";
import type { Failure, Source, Trouble } from "../api/source";
import { route } from "../route";
import { useNow } from "../ui/now";
import { setTab } from "../ui/tab";
import { PageTools } from "./page-tools";
import { ScreenBar } from "./screen-bar";
import { SignInForm, WhereTheTokenIs } from "./sign-in";
import "./trouble.css";

interface TroubleProps {
  failure: Failure;
  source: Source;
  /** What was requested, such as the name of a run. */
  what: string;
  onAgain: () => void;
}

const AGAIN_S = 5;
/** May be temporary: retry automatically. */
const PASSING: readonly Trouble[] = ["unreachable", "busy", "foreign"];
/** The title is enough; the hub's message adds nothing. */
const CLEAR: readonly Trouble[] = ["missing", "unreachable"];
const TITLES: Record<Trouble, string> = {
  refused: "Sign in",
  missing: "Run not found",
  wrong: "Invalid request",
  unreachable: "The hub is not responding",
  busy: "The hub is busy",
  foreign: "Unexpected response",
  version: "This page and its hub have different versions",
  fault: "Something went wrong",
};

export function TroubleScreen({ failure, source, what, onAgain }: TroubleProps) {
  const { trouble } = failure;
  useEffect(() => setTab(TITLES[trouble], trouble === "refused" ? "none" : "warning"), [trouble]);
  return (
    <>
      <ScreenBar home={source.kind === "hub"} title={what}>
        <span class="space" />
        <PageTools />
      </ScreenBar>
      <main id="main" class="trouble" tabIndex={-1}>
        <section class="card" aria-labelledby="trouble-title">
          <h2 id="trouble-title">{TITLES[trouble]}</h2>
          <WhatToDo failure={failure} source={source} onAgain={onAgain} />
        </section>
      </main>
    </>
  );
}

function WhatToDo({ failure, source, onAgain }: Omit<TroubleProps, "what">) {
  if (failure.trouble === "refused") {
    return (
      <>
        <p>You need the hub’s token to view this page. A session lasts twelve hours.</p>
        <SignInForm source={source} onDone={onAgain} focus />
        <p class="muted">Where to find the token:</p>
        <WhereTheTokenIs />
      </>
    );
  }
  return (
    <>
      {!CLEAR.includes(failure.trouble) && <p>{sentence(failure.message)}</p>}
      {ADVICE[failure.trouble]}
      <p class="trouble-do">
        <button type="button" class="primary" onClick={onAgain}>
          Try again
        </button>
        {route.value.screen !== "list" && <a href="#/">All runs</a>}
        {PASSING.includes(failure.trouble) && <Countdown onAgain={onAgain} />}
      </p>
    </>
  );
}

/** Retry automatically while the page is visible. */
function Countdown({ onAgain }: { onAgain: () => void }) {
  const now = useNow(1000, () => performance.now());
  const [begun] = useState(now);
  const left = Math.max(0, AGAIN_S - Math.round((now - begun) / 1000));
  useEffect(() => {
    if (left === 0) onAgain();
  }, [left === 0]);
  return <span class="muted">{left > 0 ? `retrying in ${left} s` : "retrying …"}</span>;
}

/** Turn a message of the hub, which has no capital and no period, into a sentence. */
function sentence(words: string): string {
  return `${words.charAt(0).toUpperCase()}${words.slice(1)}${/[.!?]$/.test(words) ? "" : "."}`;
}

const ADVICE: Record<Exclude<Trouble, "refused">, ComponentChildren> = {
  missing: (
    <p>
      Its folder may have been moved, renamed or removed, or this hub may serve another folder (<code>stepscope serve --all</code> serves all of them). <code>stepscope list</code> shows the runs that exist.
    </p>
  ),
  wrong: <p>The link may come from another version of this page. Open the run from the list.</p>,
  unreachable: (
    <>
      <p>A run’s hub shuts down when the run ends. To view finished runs, start a hub for all of them:</p>
      <pre>stepscope serve --all --open</pre>
    </>
  ),
  busy: <p>There are too many viewers, or too many wrong tokens came from this address. Wait a moment.</p>,
  foreign: <p>A proxy or another service on the same port responded instead of the hub. If it has a sign-in page, reload this page to see it.</p>,
  version: <p>Stepscope was updated on one side. Reload the page; if that does not help, restart the hub.</p>,
  fault: <p>Try again. If the error persists, check the hub’s output.</p>,
};
