"use strict";
// Draws the plots of dashboard.html out of the JSON in #study, with BokehJS. When all are drawn, body has data-ready.
(async () => {
  const study = JSON.parse(document.getElementById("study").textContent);
  const shown = { arms: new Set(study.arms.map((arm) => arm.name)), differences: false, pair: "" };
  const armNumber = new Map(study.arms.map((arm, i) => [arm.name, i]));
  const touch = matchMedia("(pointer: coarse)").matches;
  const FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";
  const FEW_POINTS = 40; // up to here each point has a marker

  const numbers = (text) => new Float64Array(Uint8Array.from(atob(text), (char) => char.charCodeAt(0)).buffer);
  const finite = (values) => values.filter(Number.isFinite);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const visibleArms = () => study.arms.filter((arm) => shown.arms.has(arm.name));

  function words(value) {
    const text = Number(value.toPrecision(4));
    const plain = text === 0 || (Math.abs(text) >= 1e-3 && Math.abs(text) < 1e6);
    return (plain ? String(text) : text.toExponential()).replaceAll("-", "−");
  }

  // ---- what all plots share

  const stepRanges = new Map();
  function stepRange(plot) {
    if (!stepRanges.has(plot.xLabel)) {
      const all = study.plots.filter((other) => other.kind === "curve" && other.xLabel === plot.xLabel);
      const ends = all.map((other) => numbers(other.x)).flatMap((x) => [x[0], x[x.length - 1]]);
      const [low, high] = [Math.min(...ends), Math.max(...ends)];
      const margin = Math.max(0.5, 0.02 * (high - low));
      stepRanges.set(plot.xLabel, new Bokeh.Range1d({ start: low - margin, end: high + margin }));
    }
    return stepRanges.get(plot.xLabel);
  }

  function newFigure(xRange, xLabel, unit) {
    const zoom = new Bokeh.BoxZoomTool({ dimensions: "auto" });
    const figure = new Bokeh.Plotting.Figure({
      height: 290,
      sizing_mode: "stretch_width",
      x_range: xRange,
      y_range: new Bokeh.DataRange1d({ range_padding: 0.12 }),
      toolbar_location: "below",
      tools: [
        zoom,
        new Bokeh.PanTool(),
        new Bokeh.WheelZoomTool({ modifiers: { shift: true } }),
        new Bokeh.SaveTool(),
        new Bokeh.ResetTool(),
      ],
      active_drag: touch ? null : zoom, // a finger scrolls the page until a tool is chosen
      outline_line_color: null,
      min_border_right: 12,
    });
    figure.toolbar.logo = null;
    figure.toolbar.autohide = true;
    figure.toolbar.active_scroll = figure.toolbar.tools.find((tool) => tool instanceof Bokeh.WheelZoomTool);
    for (const axis of [...figure.xaxis, ...figure.yaxis]) {
      axis.axis_label_text_font = axis.major_label_text_font = FONT;
      axis.axis_label_text_font_style = "normal";
      axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px";
      axis.axis_label_text_color = axis.major_label_text_color = "#59636e";
      axis.axis_line_color = axis.major_tick_line_color = "#8c959f";
      axis.minor_tick_line_color = null;
    }
    for (const grid of [...figure.xgrid, ...figure.ygrid]) grid.grid_line_color = "#eaeef2";
    figure.xaxis.axis_label = xLabel || null;
    figure.yaxis.axis_label = unit;
    figure.yaxis.formatter = new Bokeh.BasicTickFormatter({ power_limit_low: -5 });
    figure.anchor = figure.scatter([xRange.start], [0], { fill_alpha: 0, line_alpha: 0 });
    return figure;
  }

  // After new data: a height chosen before is given up; a constant series gets a height that suits its value, and a
  // plot without any value one around zero.
  function fitHeight(figure, renderers, series) {
    const largest = Math.max(-1, ...series.map((values) => finite(values).reduce((most, value) => Math.max(most, Math.abs(value)), -1)));
    figure.y_range.renderers = largest < 0 ? [figure.anchor] : renderers;
    figure.y_range.default_span = largest > 0 ? 0.5 * largest : 1;
    figure.y_range.have_updated_interactively = false;
  }

  // An invisible strip around each x: what the pointer is over is told for all arms at once.
  function addHover(figure, xs, tell) {
    const at = (i) => (i < 0 ? 2 * xs[0] - (xs[1] ?? xs[0] + 1) : i >= xs.length ? 2 * xs[i - 1] - (xs[i - 2] ?? xs[i - 1] - 1) : xs[i]);
    const middles = Array.from({ length: xs.length + 1 }, (_, i) => (at(i - 1) + at(i)) / 2);
    const strips = figure.vstrip({
      x0: { field: "x0" },
      x1: { field: "x1" },
      fill_alpha: 0,
      line_color: null,
      hover_fill_alpha: 0.07,
      hover_fill_color: "#000000",
      hover_line_color: null,
      level: "underlay",
      source: new Bokeh.ColumnDataSource({ data: { x0: middles.slice(0, -1), x1: middles.slice(1) } }),
    });
    const hover = new Bokeh.HoverTool({
      renderers: [strips],
      mode: "mouse",
      point_policy: "follow_mouse",
      attachment: "horizontal",
      tooltips: (_, { index }) => tooltip(tell(index)),
    });
    figure.add_tools(hover);
    figure.toolbar.active_inspect = hover;
  }

  function tooltip({ head, rows }) {
    const table = document.createElement("table");
    table.style.cssText = `font: 12px/1.45 ${FONT}; color: #1f2328; border-spacing: 6px 0`;
    table.createCaption().textContent = head;
    table.caption.style.cssText = "text-align: left; font-weight: 600; padding-left: 6px";
    for (const { colour, name, text } of rows) {
      const row = table.insertRow();
      row.insertCell().innerHTML = "&#9632;";
      row.cells[0].style.color = colour;
      row.insertCell().textContent = name;
      const value = row.insertCell();
      value.textContent = text;
      value.style.cssText = "text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums";
    }
    return table;
  }

  const spread = (values) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return values.length > 1 && low !== high ? `${words(mean(values))} (${words(low)} to ${words(high)})` : words(mean(values));
  };
  const what = (unit) => (shown.differences ? `treatment − baseline, ${unit}` : unit);

  // ---- a metric over steps

  function curve(plot) {
    const x = numbers(plot.x);
    const all = numbers(plot.y);
    const series = study.runs.map((_, i) => all.subarray(i * x.length, (i + 1) * x.length));
    const figure = newFigure(stepRange(plot), plot.xLabel, plot.unit);
    figure.xaxis.ticker = new Bokeh.BasicTicker({ min_interval: 1 });
    const source = new Bokeh.ColumnDataSource({ data: {} });
    const field = (name) => ({ field: name });
    const lines = figure.multi_line(field("xs"), field("ys"), {
      line_color: field("colour"),
      line_width: field("width"),
      line_alpha: field("alpha"),
      line_dash: field("dash"),
      source,
    });
    const dots = new Bokeh.ColumnDataSource({ data: {} });
    const points = figure.scatter(field("x"), field("y"), {
      size: 5,
      fill_color: field("colour"),
      fill_alpha: field("alpha"),
      line_color: null,
      source: dots,
    });

    // [{run, arm, values}] of what is to be seen
    function visible() {
      return study.runs.flatMap((run, i) => {
        if (!shown.arms.has(run.arm)) return [];
        if (!shown.differences) return [{ run, values: series[i] }];
        if (run.baseline === null) return [];
        return [{ run, values: series[i].map((value, j) => value - series[run.baseline][j]) }];
      });
    }

    function draw() {
      const drawn = { xs: [], ys: [], colour: [], width: [], alpha: [], dash: [] };
      const marks = { x: [], y: [], colour: [], alpha: [] };
      const add = (arm, values, width, alpha) => {
        drawn.xs.push(x);
        drawn.ys.push(values);
        drawn.colour.push(arm.colour);
        drawn.width.push(width);
        drawn.alpha.push(alpha);
        drawn.dash.push(arm.dash);
        if (x.length > FEW_POINTS) return;
        marks.x.push(...x);
        marks.y.push(...values);
        marks.colour.push(...Array(x.length).fill(arm.colour));
        marks.alpha.push(...Array(x.length).fill(alpha));
      };
      const own = visible();
      const thick = []; // drawn over all thin ones
      for (const arm of visibleArms()) {
        const runs = own.filter((item) => item.run.arm === arm.name);
        const chosen = runs.filter((item) => item.run.pair === shown.pair);
        if (shown.pair || runs.length > 1) {
          for (const item of runs) if (!chosen.includes(item)) add(arm, item.values, 1, shown.pair ? 0.15 : 0.3);
        }
        for (const item of chosen) thick.push([arm, item.values]);
        if (!shown.pair && runs.length) {
          thick.push([arm, x.map((_, j) => mean(finite(runs.map((item) => item.values[j]))))]);
        }
      }
      for (const [arm, values] of thick) add(arm, values, x.length > 150 ? 1.6 : 2.4, 1);
      source.data = drawn;
      dots.data = marks;
      figure.yaxis.axis_label = what(plot.unit);
      fitHeight(figure, [lines, points], drawn.ys);
    }

    function tell(j) {
      const own = visible().filter((item) => !shown.pair || item.run.pair === shown.pair);
      const rows = visibleArms().flatMap((arm) => {
        const values = finite(own.filter((item) => item.run.arm === arm.name).map((item) => item.values[j]));
        return values.length ? [{ colour: arm.colour, name: arm.name, text: spread(values) }] : [];
      });
      return { head: `${plot.xLabel} ${x[j]} · ${what(plot.unit)}`, rows };
    }

    addHover(figure, x, tell);
    return { figure, draw };
  }

  // ---- a value with whiskers per category and arm

  function categories(plot) {
    const places = plot.labels.map((_, j) => j);
    const room = 0.8 / study.arms.length;
    const figure = newFigure(new Bokeh.Range1d({ start: -0.6, end: places.length - 0.4 }), plot.xLabel, plot.unit);
    const many = Math.ceil(places.length / 16);
    figure.xaxis.ticker = new Bokeh.FixedTicker({ ticks: places.filter((j) => j % many === 0), minor_ticks: [] });
    figure.xaxis.major_label_overrides = new Map(plot.labels.map((label, j) => [j, wrapped(label)]));
    figure.xgrid.grid_line_color = null;
    const source = new Bokeh.ColumnDataSource({ data: {} });
    const field = (name) => ({ field: name });
    if (plot.line !== undefined) {
      figure.add_layout(new Bokeh.Span({ location: plot.line, dimension: "width", line_color: "#8c959f", line_dash: [4, 4] }));
    }
    const drawn = [];
    const bars = plot.style === "bar";
    if (bars) drawn.push(figure.vbar({ x: field("x"), width: room * 0.9, top: field("y"), fill_color: field("colour"), line_color: null, fill_alpha: 0.9, source }));
    drawn.push(figure.segment({ x0: field("x"), x1: field("x"), y0: field("low"), y1: field("high"), line_color: bars ? "#59636e" : field("colour"), line_width: 2, source }));
    if (!bars) drawn.push(figure.scatter(field("x"), field("y"), { marker: field("marker"), size: 9, fill_color: field("colour"), line_color: "#ffffff", source }));

    const differs = Object.values(plot.layers).some((layer) => layer.differences);
    const points = (layer) => (shown.differences && layer.differences ? layer.differences : layer.values);

    function draw() {
      const data = { x: [], y: [], low: [], high: [], colour: [], marker: [] };
      for (const [marker, layer] of Object.entries(plot.layers)) {
        for (const arm of visibleArms()) {
          (points(layer)[arm.name] ?? []).forEach((point, j) => {
            if (point === null) return;
            data.x.push(j + (armNumber.get(arm.name) - (study.arms.length - 1) / 2) * room);
            data.y.push(point[0]);
            data.low.push(point[1]);
            data.high.push(point[2]);
            data.colour.push(arm.colour);
            data.marker.push(marker);
          });
        }
      }
      source.data = data;
      if (differs) figure.yaxis.axis_label = what(plot.unit);
      fitHeight(figure, drawn, [data.low, data.high]);
    }

    function tell(j) {
      const rows = Object.values(plot.layers).flatMap((layer) =>
        visibleArms().flatMap((arm) => {
          const point = (points(layer)[arm.name] ?? [])[j];
          if (!point) return [];
          const [value, low, high] = point;
          const text = low === high ? words(value) : `${words(value)} (${words(low)} to ${words(high)})`;
          return [{ colour: arm.colour, name: layer.name ? `${arm.name}, ${layer.name}` : arm.name, text }];
        }),
      );
      return { head: `${plot.xLabel.split(" ")[0]} ${plot.labels[j]} · ${differs ? what(plot.unit) : plot.unit}`, rows };
    }

    addHover(figure, places, tell);
    return { figure, draw };
  }

  // Long labels in lines of a few words, so that they stand side by side on a phone.
  function wrapped(label) {
    const lines = [""];
    for (const word of label.replace("/", "/ ").split(" ")) {
      const last = lines[lines.length - 1];
      if (last && last.length + word.length > 10) lines.push(word);
      else lines[lines.length - 1] = last ? `${last} ${word}` : word;
    }
    return lines.join("\n");
  }

  // ---- bytes per parameter, stacked by kind of tensor

  function ledger(plot) {
    const figure = newFigure(new Bokeh.Range1d({ start: -0.6, end: plot.columns.length - 0.4 }), "predicted (pale) beside found", plot.unit);
    const kinds = Object.entries(plot.kinds);
    const source = new Bokeh.ColumnDataSource({ data: {} });
    const labels = new Bokeh.ColumnDataSource({ data: {} });
    const field = (name) => ({ field: name });
    const boxes = figure.quad({ left: field("left"), right: field("right"), bottom: field("bottom"), top: field("top"), fill_color: field("colour"), fill_alpha: field("alpha"), line_color: "#ffffff", source });
    figure.text({ x: field("x"), y: field("y"), text: field("text"), text_align: "center", text_baseline: field("baseline"), y_offset: field("offset"), text_font: FONT, text_font_size: "11px", text_color: "#1f2328", source: labels });
    figure.y_range.range_padding = 0.2; // room for the numbers
    figure.xgrid.grid_line_color = null;
    const present = () =>
      plot.columns.filter(({ arm }) => visibleArms().some(({ name }) => name === arm) && (!shown.differences || arm !== "baseline"));
    const baselines = plot.columns.filter(({ arm }) => arm === "baseline");
    let columns = [];

    const size = (column, side, kind) => {
      const value = column[side][kind] ?? 0;
      // A baseline that is the same in all settings is told once.
      const baseline = baselines.find(({ setting }) => setting === column.setting) ?? baselines[0];
      return shown.differences ? value - (baseline?.[side][kind] ?? 0) : value;
    };
    const label = ({ arm, setting }) => (setting ? `${arm}\n(${setting})` : arm).replaceAll("_", "_\u200b");

    function draw() {
      const data = { left: [], right: [], bottom: [], top: [], colour: [], alpha: [] };
      const told = { x: [], y: [], text: [], baseline: [], offset: [] };
      columns = present();
      columns.forEach((column, i) => {
        for (const [side, offset, alpha] of [["predicted", -0.21, 0.45], ["found", 0.21, 1]]) {
          let [up, down] = [0, 0];
          for (const [kind, colour] of kinds) {
            const height = size(column, side, kind);
            if (Math.abs(height) < 1e-9) continue;
            const from = height > 0 ? up : down;
            data.left.push(i + offset - 0.19);
            data.right.push(i + offset + 0.19);
            data.bottom.push(Math.min(from, from + height));
            data.top.push(Math.max(from, from + height));
            data.colour.push(colour);
            data.alpha.push(alpha);
            if (height > 0) up += height;
            else down += height;
          }
          told.x.push(i + offset);
          told.y.push(down < 0 && up === 0 ? down : up);
          told.baseline.push(down < 0 && up === 0 ? "top" : "bottom");
          told.offset.push(down < 0 && up === 0 ? 4 : -3);
          told.text.push(words(Number((up + down).toFixed(2))));
        }
      });
      source.data = data;
      labels.data = told;
      figure.xaxis.ticker = new Bokeh.FixedTicker({ ticks: columns.map((_, i) => i), minor_ticks: [] });
      figure.xaxis.major_label_overrides = new Map(columns.map((column, i) => [i, label(column)]));
      figure.yaxis.axis_label = what(plot.unit);
      figure.x_range.end = Math.max(columns.length, 1) - 0.4;
      fitHeight(figure, [boxes], [data.bottom, data.top]);
    }

    function tell(i) {
      const column = columns[i];
      if (!column) return { head: "", rows: [] };
      const rows = kinds.flatMap(([kind, colour]) => {
        const [predicted, found] = [size(column, "predicted", kind), size(column, "found", kind)];
        return predicted || found ? [{ colour, name: kind, text: `${words(predicted)} predicted, ${words(found)} found` }] : [];
      });
      return { head: `${label(column)} · ${what(plot.unit)}`, rows };
    }

    addHover(figure, plot.columns.map((_, i) => i), tell);
    return { figure, draw };
  }

  // ---- the page

  const makers = { curve, categories, ledger };
  const places = document.querySelectorAll(".plot");
  const plots = study.plots.map((plot) => makers[plot.kind](plot));
  const redraw = () => plots.forEach((plot) => plot.draw());

  for (const button of document.querySelectorAll("#arms button")) {
    button.addEventListener("click", () => {
      const arm = button.dataset.arm;
      if (!shown.arms.delete(arm)) shown.arms.add(arm);
      button.setAttribute("aria-pressed", shown.arms.has(arm));
      redraw();
    });
  }
  document.getElementById("mode")?.addEventListener("change", (event) => {
    shown.differences = event.target.value === "differences";
    redraw();
  });
  document.getElementById("pair")?.addEventListener("change", (event) => {
    shown.pair = event.target.value;
    redraw();
  });
  const reset = () => plots.forEach((plot) => plot.figure.reset.emit());
  document.getElementById("reset").addEventListener("click", reset);

  redraw();
  const page = new Bokeh.Document(); // one for all: ranges are shared
  for (const [i, plot] of plots.entries()) {
    page.add_root(plot.figure);
    places[i].addEventListener("dblclick", reset);
  }
  await Bokeh.embed.add_document_standalone(page, document.body, [...places]);
  document.body.dataset.ready = plots.length;
})();
