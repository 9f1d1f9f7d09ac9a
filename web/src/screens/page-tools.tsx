/** Tools at the top right of every screen: link to this view, theme, keyboard shortcuts. */

import { settle } from "../route";
import { copied } from "../ui/clipboard";
import { Icon } from "../ui/icons";
import { useShortcuts } from "../ui/shortcuts";
import { switchTheme, theme } from "../ui/theme";
import { tell } from "../ui/toast";
import { showHelp } from "./help";

/** `link`: whether the address says what is shown. */
export function PageTools({ link = true }: { link?: boolean }) {
  const other = theme.value === "dark" ? "light" : "dark";
  useShortcuts("Everywhere", [
    ...(link ? [{ keys: "c", words: "copy a link to this view", act: () => void copyLink() }] : []),
    { keys: "t", words: "switch between light and dark", act: switchTheme },
    { keys: "?", words: "show these shortcuts", act: showHelp },
  ]);
  return (
    <div class="tools">
      {link && (
        <button type="button" class="icon-button" title="Copy a link to this view (c)" aria-label="Copy link" onClick={() => void copyLink()}>
          <Icon name="link" />
        </button>
      )}
      <button type="button" class="icon-button" title={`Use the ${other} theme (t)`} aria-label={`Use the ${other} theme`} onClick={switchTheme}>
        <Icon name={other === "dark" ? "moon" : "sun"} />
      </button>
      <button type="button" class="icon-button" title="Keyboard shortcuts (?)" aria-label="Keyboard shortcuts" onClick={showHelp}>
        <Icon name="keys" />
      </button>
    </div>
  );
}

async function copyLink(): Promise<void> {
  settle();
  tell((await copied(location.href)) ? "Link copied. It includes the run, the steps and the rank." : "The browser does not allow copying here. Copy the link from the address bar.");
}
