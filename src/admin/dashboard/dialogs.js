// Modal dialogs: confirm a change, and set a quota override.

import { find, setText } from "./dom.js";

/**
 * Show a dialog until `onSubmit` succeeds after the form is submitted, or until the user cancels. Return the result of
 * `onSubmit`, or `null` if the user cancels.
 */
function open(dialog, onSubmit) {
  const form = dialog.querySelector("form");
  const error = dialog.querySelector(".error");
  const submit = form.querySelector("[type=submit]");
  setText(error, "");
  submit.disabled = false;
  dialog.showModal();
  return new Promise((resolve) => {
    let result = null;
    form.onsubmit = async (event) => {
      event.preventDefault();
      submit.disabled = true;
      try {
        result = await onSubmit();
        dialog.close();
      } catch (failure) {
        setText(error, failure.message);
        submit.disabled = false;
      }
    };
    form.querySelector(".cancel").onclick = () => dialog.close();
    dialog.onclose = () => resolve(result);
  });
}

/** Ask for confirmation, then make a change with `run`. Return the result of `run`, or `null` if the user cancels. */
export function confirmChange({ title, text, button, run }) {
  const dialog = find("#confirm");
  setText(dialog.querySelector("h2"), title);
  setText(dialog.querySelector("p"), text);
  setText(dialog.querySelector("[type=submit]"), button);
  return open(dialog, run);
}

/**
 * Ask for the values of an override, then set it with `run({ quota, burst, ttl, note })`. Return the result of `run`, or
 * `null` if the user cancels.
 */
export function askOverride({ title, quota, hasBurst, run }) {
  const dialog = find("#override");
  setText(dialog.querySelector("h2"), title);
  find("#override-quota").value = quota;
  find("#override-burst").value = "";
  find("#override-burst").closest("div").hidden = !hasBurst;
  find("#override-note").value = "";
  return open(dialog, () => run({
    quota: find("#override-quota").value.trim(),
    burst: find("#override-burst").value ? Number(find("#override-burst").value) : undefined,
    ttl: find("#override-ttl").value.trim(),
    note: find("#override-note").value.trim() || undefined,
  }));
}
