import { computed, signal } from "@preact/signals";
import { DARK, LIGHT } from "../draw/colours.ts";

export type Theme = "auto" | "light" | "dark";
const KEY = "penstock-theme";

/** Light or dark: as the system has it unless the reader chose. */
export class Themes {
  readonly chosen = signal<Theme>(stored());
  private readonly system = signal(matchMedia("(prefers-color-scheme: dark)").matches);
  readonly dark = computed(() => (this.chosen.value === "auto" ? this.system.value : this.chosen.value === "dark"));
  readonly paper = computed(() => (this.dark.value ? DARK : LIGHT));

  constructor() {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => (this.system.value = event.matches));
  }

  toggle(): void {
    this.chosen.value = this.dark.value ? "light" : "dark";
    try {
      localStorage.setItem(KEY, this.chosen.value);
    } catch {
      return; // a page that may not store anything forgets the choice
    }
  }
}

function stored(): Theme {
  try {
    const found = localStorage.getItem(KEY);
    return found === "light" || found === "dark" ? found : "auto";
  } catch {
    return "auto";
  }
}
