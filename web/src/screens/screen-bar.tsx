/** The top of every screen: skip link, logo that links to the list, heading, and the screen's own content. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import "./screen-bar.css";

/** After the first screen, a new screen focuses its heading: screen readers read it, and Tab starts there. */
let shownBefore = false;

interface ScreenBarProps {
  /** Whether there is a list of runs. */
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
          event.preventDefault(); // the fragment holds the route
          document.querySelector<HTMLElement>("main")?.focus();
        }}
      >
        Skip to content
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

/** Bars for steps, one longer than the others. */
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
