// The table of limits, which has the quotas, the rates and a small chart of each limit.

import { sparklineCell } from "./chart.js";
import { find, formatNumber, make, numberCell, setText, unitText, updateTable } from "./dom.js";

const asList = (value) => (Array.isArray(value) ? value : value == null ? [] : [value]);

/** Update the lines of a cell. A line is an array `[text, class]`. */
function updateLines(cell, lines) {
  while (cell.children.length > lines.length) cell.lastChild.remove();
  lines.forEach(([text, kind], index) => {
    const line = cell.children[index] ?? cell.appendChild(make("span"));
    setText(line, text);
    line.className = kind;
  });
}

const quotaText = ({ quota, burst }, unit, fallback) => `${quota ?? fallback}${unitText(unit)}${burst ? `, burst ${formatNumber(burst)}` : ""}`;

/**
 * Show a row for each limit. `before` contains the limits of an earlier event, `elapsed` is the number of
 * seconds since that event.
 */
export function showLimits(limits, { before, elapsed, configuration, intervals, range }) {
  const earlier = new Map(before.map(({ limit, decisions }) => [limit, decisions]));
  updateTable(find("#limits table"), limits.map(({ limit, quota, unit, shadow, decisions }) => {
    const sum = (counts, ...kinds) => kinds.reduce((total, kind) => total + counts[kind], 0);
    const rateOf = (...kinds) => {
      const old = earlier.get(limit);
      return old && elapsed ? (sum(decisions, ...kinds) - sum(old, ...kinds)) / elapsed : null;
    };
    const allowed = rateOf("allowed", "local_allowed");
    const denied = rateOf("denied", "local_denied");
    const written = configuration?.limit?.[limit] ?? {};
    const tiers = Object.entries(written.tiers ?? {});
    const history = intervals.filter(({ decisions: all }) => all.has(limit))
      .map(({ at_ms, ms, decisions: all }) => ({ at_ms, ms, counts: all.get(limit) }));
    return {
      key: limit,
      cells: [
        { update: (cell) => updateLines(cell, [[limit + (shadow ? " (shadow)" : ""), "name"], [`${written.algorithm ?? "token-bucket"} by ${asList(written.by).join(" + ") || "–"}`, "detail"]]) },
        {
          update: (cell) => updateLines(cell, [
            [quotaText({ quota, burst: written.burst }, unit) + (written.algorithm === "concurrency" ? " in flight" : ""), "quota"],
            ...tiers.map(([tier, variant]) => [`${tier}: ${quotaText(variant, unit, quota)}`, "chip"]),
          ]),
          kind: "quotas",
        },
        sparklineCell(history, range),
        numberCell(allowed),
        numberCell(denied),
        denied + allowed > 0 ? { text: `${formatNumber((100 * denied) / (denied + allowed))} %`, kind: denied ? "number denied" : "number zero" } : { text: "–", kind: "number zero" },
        numberCell(rateOf("shadow_denied")),
        numberCell(rateOf("local_allowed", "local_denied")),
        numberCell(rateOf("store_error")),
      ],
    };
  }));
  find("#limits .wide").hidden = !limits.length;
  find("#no-limits").hidden = limits.length > 0;
  const names = limits.map(({ limit }) => limit);
  const select = find("#limit");
  if (names.join("\n") !== [...select.options].slice(1).map((option) => option.value).join("\n")) {
    const chosen = select.value;
    select.replaceChildren(select.options[0], ...names.map((name) => make("option", { value: name }, name)));
    select.value = names.includes(chosen) ? chosen : "";
  }
}
