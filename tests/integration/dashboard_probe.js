// Put behind dashboard.html's own script by test_dashboard_in_chromium.py: uses the page as a person would and writes
// what it saw into an element with the id "seen", as JSON.
(async () => {
  const seen = {};
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  const inside = (root) => // Bokeh draws inside shadow roots
    [...root.querySelectorAll("*")].flatMap((element) => [element, ...(element.shadowRoot ? inside(element.shadowRoot) : [])]);
  const plots = () => [...document.querySelectorAll(".plot")];
  const canvas = (plot) => inside(plot).find((element) => element instanceof HTMLCanvasElement && element.width > 0);

  function paintedPixels(plot) {
    const { width, height } = canvas(plot) ?? {};
    if (!width) return 0;
    const pixels = canvas(plot).getContext("2d").getImageData(0, 0, width, height).data;
    let painted = 0;
    for (let i = 0; i < pixels.length; i += 4) {
      if (pixels[i + 3] && Math.min(pixels[i], pixels[i + 1], pixels[i + 2]) < 200) painted += 1;
    }
    return painted;
  }

  function pointer(plot, kind, across, down) {
    const surface = inside(plot).find((element) => element.classList.contains("bk-events"));
    const box = surface.getBoundingClientRect();
    surface.dispatchEvent(
      new PointerEvent(kind, {
        clientX: box.x + box.width * across,
        clientY: box.y + box.height * down,
        bubbles: true,
        composed: true,
        pointerType: "mouse",
        pointerId: 1,
        isPrimary: true,
        button: kind === "pointermove" ? -1 : 0,
        buttons: kind === "pointerup" ? 0 : 1,
      }),
    );
  }

  async function tooltip(plot) {
    pointer(plot, "pointermove", 0.5, 0.4);
    pointer(plot, "pointermove", 0.51, 0.4);
    await wait(300);
    const tables = inside(document.body).filter((element) => element.localName === "table" && element.caption);
    return tables.map((table) => table.innerText).join("\n");
  }

  function choose(id, value) {
    const select = document.getElementById(id);
    select.value = value;
    select.dispatchEvent(new Event("change"));
  }

  while (!document.body.dataset.ready) await wait(50);
  await wait(300);
  seen.sections = Object.fromEntries(
    [...document.querySelectorAll("section[id]")].map((section) => [
      section.id,
      [...section.querySelectorAll(".plot")].map(paintedPixels),
    ]),
  );
  seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;

  const reward = plots().find((plot) => plot.parentElement.innerText.includes("critic/rewards/mean"));
  const ofAStep = plots().find((plot) => plot.parentElement.innerText.includes("actor/entropy"));
  if (document.getElementById("mode") && reward) {
    seen.values = await tooltip(reward);
    document.querySelector("#arms button").click();
    seen.withoutBaseline = await tooltip(reward);
    document.querySelector("#arms button").click();
    choose("mode", "differences");
    seen.differences = await tooltip(reward);
    choose("mode", "values");
    choose("pair", document.getElementById("pair").options[1].value);
    seen.onePair = await tooltip(reward);
    choose("pair", "");
    const range = () => {
      const { start, end } = Bokeh.documents[0].roots()[plots().indexOf(ofAStep)].x_range;
      return [start, end];
    };
    seen.stepsAtFirst = range();
    for (const [kind, across, down] of [
      ["pointerdown", 0.3, 0.2],
      ["pointermove", 0.4, 0.5],
      ["pointermove", 0.6, 0.6],
      ["pointerup", 0.6, 0.6],
    ]) {
      pointer(reward, kind, across, down);
      await wait(100);
    }
    await wait(300);
    seen.stepsZoomed = range();
    document.getElementById("reset").click();
    await wait(300);
    seen.stepsReset = range();
  }
  const pre = document.createElement("pre");
  pre.id = "seen";
  pre.textContent = JSON.stringify(seen);
  document.body.append(pre);
})();
