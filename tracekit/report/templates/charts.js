"use strict";
// Bars and heat maps: the figures come as plotly JSON, the page adds its colours.
for (const block of document.querySelectorAll(".block.plot")) {
  const holder = block.querySelector(".canvas");
  if (!holder) continue;
  let figure = null;

  function dressed() {
    const ink = tracekit.color("--ink"), soft = tracekit.color("--soft"), line = tracekit.color("--hair");
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, automargin: true, fixedrange: true };
    const heat = figure.data.some((trace) => trace.type === "heatmap");
    for (const trace of figure.data) {
      if (!trace.meta) continue; // the invisible points that a graph's boxes and arrows hang on
      if (trace.meta.role === "heat") {
        trace.colorscale = [0, 1, 2, 3, 4].map((step) => [step / 4, tracekit.color("--heat-" + step)]);
        trace.colorbar = { ...trace.colorbar, tickfont: { color: soft } };
      } else if (trace.meta.role === "numbered") {
        const count = trace.colorscale.length / 2;
        trace.colorscale = trace.colorscale.map(([at], side) => [at, tracekit.color("--role-p" + (side >> 1) % count)]);
      } else if (trace.type === "treemap") {
        trace.marker = { ...trace.marker, colors: trace.meta.roles.map((role) => tracekit.color(role ? "--role-" + role : "--hair")) };
      } else if (trace.type === "scatter") {
        const color = tracekit.color("--role-" + trace.meta.role);
        trace.line = { ...trace.line, color };
        if (trace.stackgroup) trace.fillcolor = color;
      } else {
        trace.marker = { ...trace.marker, color: tracekit.color("--role-" + trace.meta.role) };
      }
    }
    const given = figure.layout;
    return {
      ...given,
      autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: soft },
      margin: { l: 10, r: 12, t: 34, b: 40 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: tracekit.color("--faint"), activecolor: ink },
      hoverlabel: { bgcolor: ink, bordercolor: ink, font: { color: tracekit.color("--page") }, align: "left", namelength: -1 },
      xaxis: { ...axis, ...given.xaxis, fixedrange: false, showgrid: !heat },
      yaxis: { ...axis, ...given.yaxis, showgrid: false, zeroline: false },
    };
  }

  const draw = () => {
    const plotly = tracekit.plotly();
    if (!plotly) { holder.textContent = "Not drawn: the file that several reports share, plotly.min.js, is not where this page looks for it."; return; }
    figure ??= tracekit.data(block);
    plotly.react(holder, figure.data, dressed(), {
      responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtons: [["toImage", "zoom2d", "resetScale2d"]],
    });
  };
  tracekit.whenSeen(holder, draw);
  tracekit.onScheme(() => { if (figure) draw(); });
}
