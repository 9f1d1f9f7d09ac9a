/** In the place of a screen that cannot be shown: what happened, and what to do. */

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
  /** What was asked for, to be named: a run. */
  what: string;
  onAgain: () => void;
}

const AGAIN_S = 5;
/** What may pass by itself. */
const PASSING: readonly Trouble[] = ["unreachable", "busy", "foreign"];
/** Of which the title says all that the hub could. */
const CLEAR: readonly Trouble[] = ["missing", "unreachable"];
const TITLES: Record<Trouble, string> = {
  refused: "Sign in",
  missing: "There is no such run here",
  wrong: "That cannot be asked",
  unreachable: "The hub does not answer",
  busy: "The hub is busy",
  foreign: "That was not the hub",
  version: "This page and its hub are of different versions",
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
        <p>Only those who have this hub’s token may look. It is asked for once in twelve hours.</p>
        <SignInForm source={source} onDone={onAgain} focus />
        <p class="muted">The token is</p>
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

/** It is tried again by itself, while somebody looks. */
function Countdown({ onAgain }: { onAgain: () => void }) {
  const now = useNow(1000, () => performance.now());
  const [begun] = useState(now);
  const left = Math.max(0, AGAIN_S - Math.round((now - begun) / 1000));
  useEffect(() => {
    if (left === 0) onAgain();
  }, [left === 0]);
  return <span class="muted">{left > 0 ? `again by itself in ${left} s` : "trying …"}</span>;
}

/** What the hub says begins small and ends without a stop. */
function sentence(words: string): string {
  return `${words.charAt(0).toUpperCase()}${words.slice(1)}${/[.!?]$/.test(words) ? "" : "."}`;
}

const ADVICE: Record<Exclude<Trouble, "refused">, ComponentChildren> = {
  missing: (
    <p>
      Its folder may have been moved, renamed or removed, or this hub may serve another folder: <code>stepscope list</code> says which runs there are.
    </p>
  ),
  wrong: <p>The link may come from another version of this page. Open the run from the list.</p>,
  unreachable: (
    <>
      <p>The hub of a run ends with the run, and a hub can be stopped. To look at runs that are over, start one in the folder that holds them:</p>
      <pre>stepscope serve runs</pre>
    </>
  ),
  busy: <p>Too many look at once, or too many wrong tokens came from this address. It passes.</p>,
  foreign: <p>A proxy on the way, or something else on the same port, answered in the hub’s place. If there is a sign-in of its own, reload the page to see it.</p>,
  version: <p>Stepscope was updated on one side. Reload the page; if that does not help, start the hub anew.</p>,
  fault: <p>Try again. If it stays so, what the hub printed says more.</p>,
};
