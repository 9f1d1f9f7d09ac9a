/** Keyboard shortcuts in a modal dialog; the browser keeps the focus inside and restores it afterwards. */

import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { Icon } from "../ui/icons";
import { allKeys } from "../ui/shortcuts";
import "./help.css";

const shown = signal(false);

export function showHelp(): void {
  shown.value = true;
}

export function HelpDialog() {
  const dialog = useRef<HTMLDialogElement>(null);
  const open = shown.value;
  useEffect(() => {
    if (open) dialog.current?.showModal();
  }, [open]);
  if (!open) return null;
  const close = (): void => dialog.current?.close();
  return (
    <dialog
      ref={dialog}
      class="help"
      aria-labelledby="help-title"
      onClose={() => {
        shown.value = false;
      }}
      onClick={(event) => event.target === dialog.current && close()}
    >
      <div class="help-body">
        <header class="help-head">
          <h2 id="help-title">Keyboard shortcuts</h2>
          <button type="button" class="icon-button" aria-label="Close" onClick={close}>
            <Icon name="cross" />
          </button>
        </header>
        {allKeys.value.map((group) => (
          <section key={group.title} aria-label={group.title}>
            <h3>{group.title}</h3>
            <dl>
              {group.shortcuts.map((one) => (
                <div key={one.keys}>
                  <dt>
                    {one.keys.split(" ").map((key) => (
                      <kbd key={key}>{NAMES[key] ?? key}</kbd>
                    ))}
                  </dt>
                  <dd>{one.words}</dd>
                </div>
              ))}
            </dl>
          </section>
        ))}
        <section aria-label="In a chart">
          <h3>In a chart</h3>
          <dl>
            <div>
              <dt>
                <kbd>←</kbd>
                <kbd>→</kbd>
              </dt>
              <dd>previous or next step; Page Up and Page Down move by ten</dd>
            </div>
            <div>
              <dt>
                <kbd>Enter</kbd>
              </dt>
              <dd>select that step</dd>
            </div>
            <div>
              <dt>
                <kbd>+</kbd>
                <kbd>−</kbd>
              </dt>
              <dd>zoom in, zoom out</dd>
            </div>
          </dl>
        </section>
      </div>
    </dialog>
  );
}

const NAMES: Record<string, string> = { Escape: "Esc" };
