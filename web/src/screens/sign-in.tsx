/** Sign in with the hub's token. The address does not change, so the requested view opens afterwards. */

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import type { Source } from "../api/source";
import { asFailure } from "../run/open-run";

interface SignInFormProps {
  source: Source;
  onDone: () => void;
  /** Whether the field takes the focus: if there is nothing else on the screen. */
  focus: boolean;
}

export function SignInForm({ source, onDone, focus }: SignInFormProps) {
  const field = useRef<HTMLInputElement>(null);
  const busy = useSignal(false);
  const trouble = useSignal("");
  useEffect(() => {
    if (focus) field.current?.focus();
  }, []);
  const submit = async (event: Event): Promise<void> => {
    event.preventDefault();
    const token = field.current?.value.trim() ?? "";
    if (token === "" || busy.value) return;
    busy.value = true;
    trouble.value = "";
    try {
      if (await source.signIn(token)) {
        if (field.current !== null) field.current.value = "";
        onDone();
      } else {
        trouble.value = "This is not the hub’s token. A restarted hub may have a new one.";
        field.current?.select();
      }
    } catch (error) {
      trouble.value = asFailure(error).message;
    }
    busy.value = false;
  };
  return (
    <form class="sign-in" onSubmit={(event) => void submit(event)}>
      {/* For password managers. */}
      <input type="text" autocomplete="username" value="stepscope" hidden readOnly />
      <label for="token">Token</label>
      <div class="sign-in-row">
        {/* Not kept in a signal: the token is only in this field, until it is sent. */}
        <input id="token" ref={field} type="password" autocomplete="current-password" spellcheck={false} aria-describedby="token-trouble" aria-invalid={trouble.value !== ""} />
        <button type="submit" class="primary" disabled={busy.value}>
          {busy.value ? "…" : "Sign in"}
        </button>
      </div>
      <p id="token-trouble" class="sign-in-trouble" role="alert">
        {trouble.value}
      </p>
    </form>
  );
}

export function WhereTheTokenIs() {
  return (
    <ul class="hints">
      <li>
        for <code>stepscope serve</code>: in the file named at startup, usually <code>~/.config/stepscope/serve-PORT.token</code>, or <code>serve-all.token</code> in the same folder with <code>--all</code>
      </li>
      <li>
        for an active run: <code>token</code> in <code>hub.json</code> in the run’s folder
      </li>
      <li>
        or a token made for you with <code>stepscope token create</code>
      </li>
    </ul>
  );
}
