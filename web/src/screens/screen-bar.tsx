/** The top of every screen: past it with one key, the mark that leads home, a heading, and what else the screen has. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import "./screen-bar.css";

/** The heading gets the focus when one screen takes the place of another, so that it is read and Tab goes on from there. */
let shownBefore = false;

interface ScreenBarProps {
  /** Whether there is a list to go to. */
  home: boolean;
  title: string;
  children?: ComponentChildren;
}

export function ScreenBar({ home, title, children }: ScreenBarProps) {
  const heading = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    if (shownBefore) heading.current?.focus({ preventScroll: true });
    shownBefore = true;
  }, []);
  return (
    <>
      <a
        class="skip"
        href="#main"
        onClick={(event) => {
          event.preventDefault(); // what is behind the # is the run
          document.querySelector<HTMLElement>("main")?.focus();
        }}
      >
        To the content
      </a>
      <header class="bar">
        {home ? (
          <a class="mark" href="#/" aria-label="Stepscope: all runs">
            <Logo />
            <span>Stepscope</span>
          </a>
        ) : (
          <span class="mark">
            <Logo />
            <span>Stepscope</span>
          </span>
        )}
        <h1 ref={heading} tabIndex={-1} title={title}>
          <bdi>{title}</bdi>
        </h1>
        {children}
      </header>
    </>
  );
}

/** Steps, one of which takes longer. */
function Logo() {
  return (
    <svg class="logo" viewBox="0 0 18 18" width="18" height="18" aria-hidden="true" focusable="false">
      <rect x="1" y="9" width="3" height="8" rx="1" />
      <rect x="5.3" y="9" width="3" height="8" rx="1" />
      <rect class="slow" x="9.6" y="1" width="3" height="16" rx="1" />
      <rect x="13.9" y="9" width="3" height="8" rx="1" />
    </svg>
  );
}
